"""Draft steps of one request by the worker that serves on a CPU, beside a verify of the target: times in turns."""

import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from draft_worker.borrowed import eos_token_ids
from draft_worker.config import DraftConfig, kind_specs
from draft_worker.requests import Requests
from draft_worker.shape import DraftShape
from draft_worker.train.checkpoint import write_drafter
from draft_worker.train.config import DrafterConfig
from draft_worker.train.drafter import drafter_json, first_weights, parameter_sizes
from draft_worker.weights import load_model
from draft_worker.worker import DraftWorker, Memory
from memsvc.device.kv_pool import KvPool, KvShape
from memsvc.device.page_table import PageTables
from memsvc.wire.base import WIRE_VERSION, Epoch, PageId, ReqId, pack_tokens
from memsvc.wire.mem import KindLayout, Layout
from memsvc.wire.spec import Drafted, DraftHello, DraftOpen, DraftReady, Propose
from memsvc.wire.text import Sampling
from target_worker.model.config import TargetShape
from tests.bench.cpu_kernels import CONTEXT, PAGE_SIZE, Target

DTYPE = "bfloat16"
ACCEPTED = 4
"""Rows of the verify before whose features a step writes into draft KV."""
NUM_PAGES = 2 * -(-CONTEXT // PAGE_SIZE)
WARM_UPS = 3
RID = ReqId(1)
EMPTY = Propose([], [], [], [], [], [], [], [], [], [], 0, [], [], [], [])
GREEDY = Sampling(seed=1, max_tokens=1 << 20, temperature=0.0)
PARTS = ("draft", "fwd", "head", "select", "verify")


def shape_of(config: DrafterConfig, target: TargetShape) -> DraftShape:
    """That of the drafter which training would make."""
    return DraftShape.from_json(_json_of(config, target))


def num_parameters(shape: DraftShape) -> int:
    """Numbers that are trained; embedding and head are the target's."""
    return sum(int(np.prod(size)) for size in parameter_sizes(shape).values())


def _json_of(config: DrafterConfig, target: TargetShape) -> dict[str, Any]:
    return drafter_json(config, target, config.draft_vocab or target.vocab_size, DTYPE)


def write_random(folder: Path, config: DrafterConfig, target: TargetShape) -> None:
    """A drafter in the files that training writes, with first weights, its head over tokens drawn from all."""
    made = _json_of(config, target)
    drawn = None
    if config.draft_vocab:
        order = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(0))
        drawn = order[: config.draft_vocab].sort().values
    write_drafter(folder, made, first_weights(DraftShape.from_json(made), 0), drawn, getattr(torch, DTYPE))


class Turns:
    """A worker with one request of CONTEXT tokens, and the target's side of the conversation."""

    def __init__(self, drafter: Path, target: Path) -> None:
        shape = DraftShape.from_folder(drafter)
        self.num_drafts = shape.block_size - 1
        config = DraftConfig(run_dir="", draft_path=str(drafter), target_path=str(target), dtype=DTYPE)
        memory = _memory(shape)
        tables = PageTables(max_reqs=1, max_pages=NUM_PAGES, page_size=PAGE_SIZE)
        requests = Requests(tables, eos_token_ids(target))
        self._worker = DraftWorker(config, load_model(config, shape), memory, requests, lambda _: None)
        reply = self._worker.handle(DraftHello(WIRE_VERSION, "main", Epoch(1), shape.target_hidden_size, DTYPE))
        assert isinstance(reply, DraftReady), reply
        generator = np.random.default_rng(0)
        self._tokens = generator.integers(0, shape.vocab_size, CONTEXT + 1).tolist()
        self._pages = [PageId(page) for page in (1 + generator.permutation(NUM_PAGES)).tolist()]
        self._closes: list[ReqId] = []

    def rewind(self) -> None:
        """The request as it stands before the step: the features of its last ACCEPTED tokens are not written yet."""
        known = CONTEXT - ACCEPTED
        tokens = pack_tokens(self._tokens[: known + 1])
        opened = DraftOpen(RID, known, 0, self._pages, known, tokens, GREEDY)
        self._handle(msgspec.structs.replace(EMPTY, closes=self._closes, opens=[opened]))
        self._closes = [RID]

    def step(self) -> Drafted:
        """One draft step: features written, a block drafted. `rewind` comes before it."""
        return self._handle(
            msgspec.structs.replace(
                EMPTY,
                write_rids=[RID], write_starts=[CONTEXT - ACCEPTED], write_lens=[ACCEPTED], write_rows=[0],
                num_drafts=self.num_drafts, rids=[RID], anchors=self._tokens[-1:], anchor_pos=[CONTEXT],
                new_tokens=[pack_tokens(self._tokens[-ACCEPTED:])],
            )
        )  # fmt: skip

    def _handle(self, msg: Propose) -> Drafted:
        reply = self._worker.handle(msg)
        assert isinstance(reply, Drafted), reply
        return reply


def _memory(shape: DraftShape) -> Memory:
    """Random K and V on every page, and ACCEPTED rows of random features."""
    dtype: torch.dtype = getattr(torch, DTYPE)
    (spec,) = kind_specs(shape, PAGE_SIZE, DTYPE)
    kind = KindLayout(spec.name, spec.page_bytes, PAGE_SIZE, 0, spec.window, 1, spec.page_bytes, 1 + NUM_PAGES)
    pool_bytes = kind.num_pages * spec.page_bytes
    exchange_bytes = ACCEPTED * shape.feature_width * dtype.itemsize
    arena = torch.zeros(pool_bytes + exchange_bytes, dtype=torch.uint8)
    layout = Layout(
        arena_bytes=len(arena), frame_bytes=spec.page_bytes, num_frames=kind.num_pages, page_size=PAGE_SIZE,
        kinds=[kind], exchange_offset=pool_bytes, exchange_bytes=exchange_bytes,
    )  # fmt: skip
    form = KvShape(num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, dtype=dtype)
    arena.view(dtype).normal_(generator=torch.Generator().manual_seed(0))
    return Memory(arena=arena, layout=layout, pool=KvPool(arena, kind, form))


@dataclass(slots=True)
class Seen:
    """Milliseconds of one variant's turns, by part."""

    times: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})

    def add(self, drafted: Drafted, draft_s: float, verify_s: float) -> None:
        """One turn."""
        us = (draft_s * 1e6, drafted.fwd_us, drafted.head_us, drafted.select_us, verify_s * 1e6)
        for part, value in zip(PARTS, us, strict=True):
            self.times[part].append(value / 1e3)

    def medians(self) -> dict[str, float]:
        """Of all parts, the warm-ups left out."""
        return {f"{part}_ms": round(statistics.median(all_[WARM_UPS:]), 3) for part, all_ in self.times.items()}


def measure(
    target: Path, configs: dict[str, DrafterConfig], threads: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """A row for each variant and number of threads. In a round each variant has its turn, right after a verify.

    So weights come from memory as they do in serving, and a machine that is slow for a while is so for all.
    """
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack, torch.inference_mode():
        verifying = Target(str(target))
        turns = {}
        for name, config in configs.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            write_random(folder, config, verifying.model.shape)
            turns[name] = Turns(folder, target)
        for num_threads in threads:
            torch.set_num_threads(num_threads)
            seen = _rounds(verifying, turns, WARM_UPS + rounds)
            rows += [{"variant": name, "threads": num_threads} | seen[name].medians() for name in turns]
    return rows


def _rounds(target: Target, turns: dict[str, Turns], rounds: int) -> dict[str, Seen]:
    seen = {name: Seen() for name in turns}
    names = list(turns)
    for number in range(rounds):
        # Nobody always comes after the same one.
        for name in np.random.default_rng(number).permutation(names).tolist():
            one = turns[name]
            verify = target.forward(1, 1 + one.num_drafts)
            one.rewind()
            started = time.perf_counter()
            verify()
            verified = time.perf_counter()
            drafted = one.step()
            seen[name].add(drafted, time.perf_counter() - verified, verified - started)
    return seen
