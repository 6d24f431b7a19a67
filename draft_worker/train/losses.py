"""What training minimises, and what it watches, over the drafted rows of a batch."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from draft_worker.model import DraftModel
from draft_worker.train.config import LossConfig
from target_worker.train.fused import Fused


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """m drafted rows of blocks; the k rows of a block follow each other."""

    z: torch.Tensor
    """[m, H]: final-normed."""
    before: torch.Tensor
    """int64 [m]: token before the row's."""
    labels: torch.Tensor
    """int64 [m]: token wanted, -1 for none."""
    target: torch.Tensor
    """float32 [m, draft V]: the target's probability of each head row's token."""
    num_drafts: int
    """k"""


def decay(num_drafts: int, gamma: float, device: torch.device) -> torch.Tensor:
    """float32 [k]: exp(-(j - 1) / gamma) for rows j = 1..k."""
    return torch.exp(-torch.arange(num_drafts, device=device) / gamma)


def head_rows(draft_to_target: torch.Tensor | None, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Row of the head for each label; -1 for labels that are -1 or that the reduced head lacks."""
    if draft_to_target is None:
        return labels
    inverse = torch.full((vocab_size + 1,), -1, dtype=torch.int64, device=labels.device)
    inverse[draft_to_target] = torch.arange(len(draft_to_target), device=labels.device)
    return inverse[labels]


def reachable(wanted: torch.Tensor, num_drafts: int) -> torch.Tensor:
    """float32 [m]: 1 for rows whose own token and all before it in the block can be drafted, else 0."""
    return (wanted >= 0).view(-1, num_drafts).float().cumprod(1).flatten()


def block_loss(model: DraftModel, rows: Rows, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, and its parts and the hit rate of each row's best token, detached.

    Rows past a token that the head lacks have no weight: serving never gets there.
    """
    wanted = head_rows(model.draft_to_target, rows.labels, model.shape.vocab_size)
    there = reachable(wanted, rows.num_drafts)
    weights = there * decay(rows.num_drafts, config.gamma, there.device).repeat(len(there) // rows.num_drafts)
    weights = weights / weights.sum().clamp(min=1e-6)
    logits = F.linear(rows.z, model.head)
    label = wanted.clamp(min=0)
    cross_entropy, variation = _fused_losses(logits, label, rows.target, config.tv_temperature)
    parts = {"cross_entropy": weights @ cross_entropy, "total_variation": weights @ variation}
    loss = config.cross_entropy * parts["cross_entropy"] + config.total_variation * parts["total_variation"]
    if model.selector is not None:
        parts["selector"] = weights @ selector_loss(model, rows, logits, label)
        loss = loss + config.selector * parts["selector"]
    hits = (logits.argmax(1) == wanted).view(-1, rows.num_drafts).float()
    seen = (rows.labels >= 0).view(-1, rows.num_drafts).float()
    parts["accuracy"] = (hits * seen).sum(0) / seen.sum(0).clamp(min=1)
    return loss, {name: part.detach() for name, part in parts.items()}


def row_losses(
    logits: torch.Tensor, label: torch.Tensor, target: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy and total variation distance of each row, float32 [m] both."""
    wide = logits.float()
    return F.cross_entropy(wide, label, reduction="none"), total_variation(wide, target, temperature)


_fused_losses = Fused(row_losses, moving=3)


def total_variation(logits: torch.Tensor, target: torch.Tensor, temperature: float) -> torch.Tensor:
    """1 - sum of min(p, q) per row [m]: the chance that the best coupling of the two rejects.

    target sums to less than 1 where the reduced head lacks tokens; that part always counts as rejected.
    """
    return 1 - torch.minimum(torch.softmax(logits / temperature, 1), target).sum(1)


def selector_loss(model: DraftModel, rows: Rows, logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Cross-entropy [m] of the wanted token among the row's best K, scored after the token that truly stood before.

    A wanted token that is not among them takes the place of the last one.
    """
    assert model.selector is not None
    best = logits.detach().topk(model.shape.selector_top_k, dim=1).indices
    found = best == label[:, None]
    best[:, -1] = torch.where(found.any(1), best[:, -1], label)
    place = (best == label[:, None]).int().argmax(1)
    return F.cross_entropy(selector_scores(model, rows, logits, best), place, reduction="none")


def selector_scores(model: DraftModel, rows: Rows, logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """float32 [m, K]: unary logit plus the pairwise term, of head rows best [m, K]."""
    selector = model.selector
    assert selector is not None
    r = F.linear(rows.z, selector.hidden_projection).float()
    query = F.embedding(rows.before, selector.predecessor).float() * r
    keys = F.embedding(model.token_ids(best), selector.successor).float()
    return logits.gather(1, best).float() + (keys @ query[:, :, None])[:, :, 0]
