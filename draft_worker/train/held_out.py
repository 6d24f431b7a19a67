"""Acceptance on answers kept from training, without a server: drafts at every place, then the walk of serving."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from draft_worker.candidates import CandidateFinder
from draft_worker.choice import first_best, walk
from draft_worker.model import DraftModel
from draft_worker.train.batches import Batch, make_batch
from draft_worker.train.blocks import Blocks, block_rows, make_blocks
from draft_worker.train.losses import Rows, selector_scores
from draft_worker.train.sequences import Sequences
from draft_worker.train.target import FrozenTarget

_ROWS = 24576
"""Block rows of a forward, about."""
_SAMPLED_STRIDE = 4


@dataclass(slots=True)
class Acceptance:
    """Verify steps, and how many of them accepted at least j + 1 drafts."""

    num_drafts: int
    steps: int = 0
    accepted: np.ndarray = field(init=False)
    """float64 [k]: counts, or sums of chances."""

    def __post_init__(self) -> None:
        self.accepted = np.zeros(self.num_drafts)

    def facts(self, name: str) -> dict[str, float | list[float]]:
        """Mean length with the target's own token, and the share of steps that reach each position."""
        share = self.accepted / max(1, self.steps)
        return {
            f"accept_length_{name}": round(float(1 + share.sum()), 4),
            f"accept_per_position_{name}": [round(float(value), 4) for value in share],
            f"steps_{name}": self.steps,
        }


@torch.no_grad()
def estimate(
    model: DraftModel, target: FrozenTarget, sequences: Sequences, indices: np.ndarray
) -> dict[str, float | list[float]]:
    """Facts about greedy answers (exact: every step serving would take) and sampled ones (expected acceptance).

    Serving drafts from features of its own bits, so on another device or batch shape a few drafts differ.
    """
    num_drafts = model.shape.block_size - 1
    is_greedy = sequences.temperatures[indices] == 0
    greedy, sampled = Acceptance(num_drafts), Acceptance(num_drafts)
    for batch in _batches(sequences, indices[is_greedy], 1, model.shape.block_size):
        drafts, blocks = greedy_drafts(model, target, batch)
        count_steps(greedy, batch, drafts, blocks.labels.cpu().numpy())
    for batch in _batches(sequences, indices[~is_greedy], _SAMPLED_STRIDE, model.shape.block_size):
        add_expected(sampled, model, target, batch)
    return greedy.facts("greedy") | sampled.facts("sampled")


def _batches(sequences: Sequences, indices: np.ndarray, stride: int, block_size: int) -> Iterator[Batch]:
    lens = sequences.lens[indices]
    order = indices[np.argsort(lens, kind="stable")]
    per_batch = max(1, int(_ROWS * stride // (block_size * max(1, int(lens.max(initial=1))))))
    for start in range(0, len(order), per_batch):
        yield make_batch(sequences, order[start : start + per_batch], stride, np.random.default_rng(0))


def greedy_drafts(model: DraftModel, target: FrozenTarget, batch: Batch) -> tuple[np.ndarray, Blocks]:
    """Drafts int64 [n, A, k] at the batch's anchors, chosen as serving chooses them for greedy requests."""
    shape = model.shape
    blocks = make_blocks(batch, shape.block_size, model.head.device)
    features, _ = target.read(blocks.tokens)
    z = block_rows(model, blocks, features)
    finder = CandidateFinder(shape.output_multiplier, shape.final_logit_softcapping)
    top_k = shape.selector_top_k if model.selector is not None else 1
    unary, rows = (part.view(*z.shape[:2], top_k) for part in finder.top(model.logits(z.flatten(0, 1)), top_k))
    ids = model.token_ids(rows)
    if model.selector is None:
        lattice = unary[:, :, None]
    else:
        lattice = model.selector.lattice(z, blocks.before[:, :, 0].flatten(), unary, ids)
    drafts = walk(lattice.cpu().numpy(), ids.cpu().numpy(), first_best)
    return drafts.reshape(*blocks.anchors.shape, -1), blocks


def count_steps(acceptance: Acceptance, batch: Batch, drafts: np.ndarray, labels: np.ndarray) -> None:
    """Walk through each answer as serving does: an anchor, the drafts accepted, the target's own token, which anchors.

    The batch must have an anchor at every place of its answers. Steps whose block passes the end are left out.
    """
    runs = (drafts == labels).cumprod(axis=2).sum(axis=2)
    num_drafts = drafts.shape[2]
    places = batch.is_anchor.sum(axis=1)
    for row, num in enumerate(places.tolist()):
        place = 0
        while place + num_drafts <= num:
            accepted = int(runs[row, place])
            acceptance.steps += 1
            acceptance.accepted[:accepted] += 1
            place += accepted + 1


def add_expected(acceptance: Acceptance, model: DraftModel, target: FrozenTarget, batch: Batch) -> None:
    """Chances of the best coupling of draft and target at the batch's anchors, each row after the answer's tokens."""
    shape, num_drafts = model.shape, model.shape.block_size - 1
    blocks = make_blocks(batch, shape.block_size, model.head.device)
    features, hidden = target.read(blocks.tokens)
    z = block_rows(model, blocks, features).flatten(0, 1)
    temperature = float(batch.temperatures[0])
    rows = Rows(
        z=z,
        before=blocks.before.flatten(),
        labels=blocks.labels.flatten(),
        target=target.probabilities(hidden_before(hidden, blocks), model.draft_to_target, temperature),
        num_drafts=num_drafts,
    )
    overlap = _overlap(model, rows, temperature).view(-1, num_drafts)
    whole = (rows.labels.view(-1, num_drafts) >= 0).all(1)
    acceptance.steps += int(whole.sum())
    acceptance.accepted += overlap[whole].cumprod(1).sum(0).double().cpu().numpy()


def _overlap(model: DraftModel, rows: Rows, temperature: float) -> torch.Tensor:
    """float32 [m]: sum of min(p, q) over the row's candidates."""
    logits = F.linear(rows.z, model.head).float()
    best = logits.topk(model.shape.selector_top_k or min(16, logits.shape[1]), dim=1).indices
    scores = logits.gather(1, best) if model.selector is None else selector_scores(model, rows, logits, best)
    return torch.minimum(torch.softmax(scores / temperature, 1), rows.target.gather(1, best)).sum(1)


def hidden_before(hidden: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """[n * A * k, hidden]: the target's state that predicts each drafted row's token; rows past the end take the last."""
    n, num_tokens = blocks.tokens.shape
    places = blocks.positions[:, :, :-1].clamp(max=num_tokens - 1)
    places = places + num_tokens * torch.arange(n, device=hidden.device)[:, None, None]
    return hidden[places.flatten()]
