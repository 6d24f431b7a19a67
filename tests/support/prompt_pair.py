"""A target whose prompts go through buckets beside one whose prompts do not: whatever is done to both leaves the same."""

from collections.abc import Sequence
from pathlib import Path

import torch

from memsvc.device.kv_dtype import AUTO
from memsvc.wire.text import Sampling
from target_worker.req import Req
from tests.support.device_target import PAGE_SIZE, DeviceTarget

BUCKETS = (8, 16)
TAPS = (1, 0)
BLOCK_SIZE = 3
NUM_TOKENS = 40
"""Pages of each request hold so many."""


def sampling(rid: int, **changes: object) -> Sampling:
    return Sampling(**{"temperature": 0.0, "seed": rid, "max_tokens": 40, "ignore_eos": True} | changes)


class PromptPair:
    """A target whose prompts go through buckets, and one that has none. All is done to both."""

    def __init__(self, folder: Path, device: str, taps: Sequence[int] = TAPS, kv: str = AUTO) -> None:
        self.graphed, self.eager = (
            DeviceTarget(folder, device, block_size=BLOCK_SIZE, taps=taps, kv=kv, prompt_buckets=buckets)
            for buckets in (BUCKETS, ())
        )
        self.reqs: dict[int, tuple[Req, Req]] = {}

    def open(self, rid: int, prompt: Sequence[int], prefix_of: int = 0, num_cached: int = 0, **params: object) -> None:
        """prefix_of: the request in whose pages the first num_cached tokens are."""
        found = [target.open(rid, prompt, NUM_TOKENS, sampling(rid, **params)) for target in (self.graphed, self.eager)]
        for target, req, other in zip((self.graphed, self.eager), found, self.reqs.get(prefix_of, found), strict=True):
            req.computed_len = num_cached
            for idx in range(num_cached // PAGE_SIZE):
                target.tables.set(req.rid, idx, int(target.tables.table[other.row, idx]))
        self.reqs[rid] = found[0], found[1]

    def step(self, chunks: dict[int, int], decode: Sequence[int] = (), drafts: Sequence[int] = ()) -> None:
        """The same tokens from both, and all memory alike. drafts: of each that decodes."""
        emitted = []
        for target, of in ((self.graphed, 0), (self.eager, 1)):
            reqs = {rid: pair[of] for rid, pair in self.reqs.items()}
            for rid in decode if drafts else ():
                target.draft(reqs[rid], drafts)
            plan = {reqs[rid]: num for rid, num in chunks.items()}
            found = target.step([reqs[rid] for rid in decode], plan)
            emitted.append({req.rid: tokens for req, tokens in found.items()})
        assert emitted[0] == emitted[1]
        assert len(emitted[0]) >= len(decode)
        self.check(self.graphed.work.first_row(len(decode)) + sum(chunks.values()))

    def check(self, num_feature_rows: int) -> None:
        """Pages but for the dummy, that many features, and slots but for the dummy."""
        graphed, eager = self.graphed, self.eager
        for layer in range(len(graphed.model.layers)):
            for part in (graphed.memory.pool.k, eager.memory.pool.k), (graphed.memory.pool.v, eager.memory.pool.v):
                same(part[0](layer)[1:], part[1](layer)[1:])
        if graphed.features is not None and eager.features is not None:
            same(graphed.features[:num_feature_rows], eager.features[:num_feature_rows])
        for name in ("length", "anchor", "num_rows", "done", "num_drafts", "num_emitted", "n_out", "num_tokens"):
            assert getattr(graphed.slots, name).tolist() == getattr(eager.slots, name).tolist(), name
        assert torch.equal(graphed.slots.counts, eager.slots.counts)
        assert graphed.slots.done[0] == 3


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Poison where there is poison. Of e4m3 the next number is no mistake: it may be a tie."""
    rtol = 0.13 if got.dtype.itemsize == 1 else 1e-4
    torch.testing.assert_close(got.float(), want.float(), rtol=rtol, atol=1e-4, equal_nan=True)
