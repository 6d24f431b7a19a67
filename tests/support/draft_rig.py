"""A drafter over a small poisoned pool, with the oracle beside it, for tests of draft_worker."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from draft_worker.batch import BlockBatch
from draft_worker.config import DraftConfig, kind_specs
from draft_worker.features import FeatureWrites, exchange_rows, write_features
from draft_worker.propose import Proposer
from draft_worker.shape import DraftShape
from draft_worker.weights import load_model
from memsvc.device.fp8_pages import rounded
from memsvc.device.hf_config import read_json
from memsvc.device.kv_dtype import AUTO, FP8_E4M3
from memsvc.device.kv_pool import KvPool, KvShape
from memsvc.device.page_table import PageTables
from memsvc.device.row_sampler import RowSampler
from memsvc.wire.base import PageId, ReqId
from memsvc.wire.mem import KindLayout
from memsvc.wire.text import Sampling
from tests.support.dflash_oracle import DFlashOracle, Pick, pick_first_best
from tests.support.make_drafter import make_drafter, make_target_stub
from tests.support.tiny_target import page_dtype

PAGE_SIZE = 4
PAGES_PER_FRAME = 3
NUM_PAGES = 240
EXCHANGE_ROWS = 96

GREEDY = Sampling(seed=1, max_tokens=64, temperature=0.0)


def draft_kind(shape: DraftShape, kv: str = AUTO) -> KindLayout:
    """draft_kv as a service would lay it out, the stride wider than a page. kv: one of KV_CACHE_DTYPES."""
    (spec,) = kind_specs(shape, PAGE_SIZE, "float32", kv)
    return KindLayout(
        name=spec.name,
        page_bytes=spec.page_bytes,
        tokens_per_page=PAGE_SIZE,
        pages_per_req=0,
        window=spec.window,
        pages_per_frame=PAGES_PER_FRAME,
        stride_bytes=-(-spec.page_bytes // 256) * 256 + 256,
        num_pages=NUM_PAGES,
    )


class DraftRig:
    """Every byte of the arena is NaN until it is written, and pages come in no order."""

    def __init__(
        self, folder: Path, version: int, *, seed: int = 0, tied: bool = False, kv: str = AUTO, **overrides: Any
    ) -> None:
        target = make_target_stub(folder / "target", tied=tied)
        drafter = make_drafter(folder / "drafter", target, version, seed=seed, **overrides)
        self.config = DraftConfig(run_dir="", draft_path=str(drafter), target_path=str(target), dtype="float32")
        self.shape = DraftShape.from_folder(drafter)
        self.model = load_model(self.config, self.shape)
        borrowed = load_file(target / "model.safetensors")
        embedding = borrowed["model.embed_tokens.weight"]
        head = borrowed.get("lm_head.weight", embedding)
        tensors = load_file(drafter / "model.safetensors")
        self.oracle = DFlashOracle(read_json(drafter / "config.json"), tensors, embedding, head)
        if kv == FP8_E4M3:
            self.oracle.kept = lambda x: rounded(x).float()
        kind = draft_kind(self.shape, kv)
        exchange_bytes = EXCHANGE_ROWS * self.shape.feature_width * 4
        pool_bytes = kind.num_pages * kind.stride_bytes
        self.arena = torch.full((pool_bytes + exchange_bytes,), 0xFF, dtype=torch.uint8)
        kv_shape = KvShape(
            num_layers=self.shape.num_layers,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            dtype=page_dtype(kv, torch.float32),
        )
        self.pool = KvPool(self.arena, kind, kv_shape)
        self.tables = PageTables(max_reqs=8, max_pages=40, page_size=PAGE_SIZE)
        self.exchange = exchange_rows(self.arena, pool_bytes, exchange_bytes, self.shape.feature_width, torch.float32)
        self.rng = np.random.default_rng(seed)
        self._free = list(self.rng.permutation(np.arange(PAGES_PER_FRAME, NUM_PAGES)))
        self.features: dict[int, dict[int, torch.Tensor]] = {}
        self.tokens: dict[int, list[int]] = {}

    def open(self, rid: int, context_len: int, valid_from: int = 0) -> None:
        """A request whose features of [valid_from, context_len) are written; pages wholly below have none."""
        self.tables.add(ReqId(rid))
        first = valid_from // PAGE_SIZE
        for index in range(first, -(-(context_len + 16) // PAGE_SIZE)):
            self.tables.set(ReqId(rid), index, PageId(int(self._free.pop())))
        self.tokens[rid] = self.rng.integers(0, self.shape.vocab_size, context_len + 1).tolist()
        self.features[rid] = {}
        self.write({rid: (valid_from, context_len - valid_from)})

    def write(self, runs: dict[int, tuple[int, int]]) -> None:
        """Random features for tokens [start, start + num) of each request, all in one call."""
        first = dict.fromkeys(runs, 3)
        row = 3
        for rid, (start, num) in runs.items():
            first[rid] = row
            made = torch.from_numpy(self.rng.standard_normal((num, self.shape.feature_width))).float()
            self.exchange[row : row + num] = made
            self.features[rid] |= {start + index: made[index] for index in range(num)}
            row += num + 1
        columns = FeatureWrites(
            rows=np.array([self.tables.row(ReqId(rid)) for rid in runs]),
            starts=np.array([start for start, _ in runs.values()]),
            lens=np.array([num for _, num in runs.values()]),
            first=np.array(list(first.values())),
        )
        with torch.inference_mode():
            write_features(self.model, self.pool, self.tables, self.exchange, columns)

    def batch(self, rids: list[int], num_drafts: int) -> BlockBatch:
        """The next block of each request."""
        written = [self.features[rid] for rid in rids]
        return BlockBatch(
            rows=np.array([self.tables.row(ReqId(rid)) for rid in rids]),
            anchors=np.array([self.tokens[rid][-1] for rid in rids]),
            anchor_pos=np.array([len(self.tokens[rid]) - 1 for rid in rids]),
            context_start=np.array(
                [min(features, default=len(self.tokens[rid]) - 1) for rid, features in zip(rids, written, strict=True)]
            ),
            num_drafts=num_drafts,
        )

    def sampler(self, rid: int, sampling: Sampling) -> RowSampler:
        """The request's sampler, with the first three tokens as its prompt."""
        return RowSampler(sampling, eos_ids=[2], prompt=self.tokens[rid][:3], output=self.tokens[rid][3:])

    def propose(
        self,
        rids: list[int],
        num_drafts: int,
        *,
        route: str = "paged",
        sampling: Sampling = GREEDY,
        buckets: tuple[int, ...] = (),
    ) -> list[list[int]]:
        """Drafts by draft_worker."""
        proposer = Proposer(self.model, self.pool, self.tables, route, buckets)
        samplers = [self.sampler(rid, sampling) for rid in rids]
        return proposer.propose(self.batch(rids, num_drafts), samplers).token_ids.tolist()

    def expected(self, rid: int, num_drafts: int, pick: Pick = pick_first_best) -> list[int]:
        """Drafts by the oracle."""
        tokens = self.tokens[rid]
        return self.oracle.propose(self.features[rid], tokens[-1], len(tokens) - 1, num_drafts, pick)
