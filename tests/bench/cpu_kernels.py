"""The compiled CPU kernels against the torch code they stand for: single kernels, and forwards of a target.

`python -m tests.bench.cpu_kernels MODEL --threads 2` prints JSON lines for a target's folder in bfloat16. Both sides take turns in
one process, so that a machine that is slow for a while is slow for both; what counts are the ratios. Times are medians
in microseconds, of the process's CPUs and of the wall; the caches hold what a forward leaves in them, as every layer
has weights and pages of its own.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from draft_worker import attention as draft_attention
from memsvc.device import kv_pool, layers, rope
from memsvc.device.cpu.kernels import kernels_for, load
from memsvc.device.kv_pool import KvPool, KvShape
from memsvc.device.page_table import PageTables
from memsvc.wire.base import PageId, ReqId
from memsvc.wire.mem import KindLayout
from target_worker import attention
from target_worker.attention import PagedAttention, Span
from target_worker.model.config import kind_specs
from target_worker.model.decoder import Decoder, DecoderLayer
from target_worker.model.weights import load_target
from target_worker.runner import Runner, Segment

SWITCHED = (layers, rope, kv_pool, attention, draft_attention)
PAGE_SIZE, CONTEXT, MAX_REQS, MAX_PAGES = 16, 150, 32, 16
FORWARDS = {"1x1": (1, 1), "8x1": (8, 1), "32x1": (32, 1), "1x8": (1, 8), "4x8": (4, 8), "32x4": (32, 4)}
"""Requests x rows of each."""


@contextmanager
def torch_only() -> Iterator[None]:
    """Everything by torch's code."""
    for module in SWITCHED:
        module.kernels_for = lambda _: None
    try:
        yield
    finally:
        for module in SWITCHED:
            module.kernels_for = kernels_for


def clocked(run: Callable[[], object], calls: int) -> tuple[float, float]:
    """Microseconds a call, of CPU and wall."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        run()
    return (time.process_time() - cpu) / calls * 1e6, (time.perf_counter() - wall) / calls * 1e6


def compare(what: str, run: Callable[[], object], *, calls: int, turns: int) -> None:
    """One line: both sides in turns, and the median of the ratios of neighbours."""
    sides: dict[str, list[tuple[float, float]]] = {"torch": [], "compiled": []}
    run()
    for turn in range(turns):
        for side in sorted(sides, reverse=turn % 2 == 0):
            if side == "torch":
                with torch_only():
                    sides[side].append(clocked(run, calls))
            else:
                sides[side].append(clocked(run, calls))
    found: dict[str, object] = {"what": what, "threads": torch.get_num_threads(), "turns": turns}
    for i, clock in enumerate(("cpu", "wall")):
        for side, times in sides.items():
            found[f"{side}_{clock}_us"] = round(statistics.median(t[i] for t in times), 1)
        pairs = zip(sides["torch"], sides["compiled"], strict=True)
        found[f"speedup_{clock}"] = round(statistics.median(a[i] / b[i] for a, b in pairs), 2)
    print(json.dumps(found), flush=True)


class Target:
    """A model with requests of CONTEXT tokens and a few more, their pages spread over the pool."""

    def __init__(self, path: str) -> None:
        self.model, shape = load_target(path, "bfloat16")
        (spec,) = kind_specs(shape, PAGE_SIZE, "bfloat16")
        num_pages = MAX_REQS * MAX_PAGES + 1
        kind = KindLayout(spec.name, spec.page_bytes, PAGE_SIZE, 0, 0, 1, spec.page_bytes, num_pages)
        form = KvShape(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=torch.bfloat16,
        )
        self.pool = KvPool(torch.zeros(num_pages * spec.page_bytes, dtype=torch.uint8), kind, form)
        self.tables = PageTables(max_reqs=MAX_REQS, max_pages=MAX_PAGES, page_size=PAGE_SIZE)
        self.runner = Runner(self.model, self.pool, self.tables)
        order = (torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(1)) + 1).tolist()
        self.rows = []
        for rid in range(MAX_REQS):
            self.rows.append(self.tables.add(ReqId(rid)))
            self.tables.set_row(ReqId(rid), [PageId(order.pop()) for _ in range(MAX_PAGES)])
            tokens = torch.randint(
                0, shape.vocab_size, (CONTEXT + rid % 7,), generator=torch.Generator().manual_seed(rid)
            )
            self.runner.forward([Segment(self.rows[rid], 0, tokens.tolist(), 1)])

    def forward(self, num_reqs: int, num_rows: int) -> Callable[[], object]:
        """A step of plain decoding (1 row) or of verifying."""
        segments = [
            Segment(self.rows[i], CONTEXT + i % 7, [100 + i + j for j in range(num_rows)], num_rows)
            for i in range(num_reqs)
        ]
        return lambda: self.runner.forward(segments)

    def kernels(self, num_reqs: int, num_rows: int) -> dict[str, Callable[[], object]]:
        """What each does in all layers of such a step."""
        model, num = self.model, num_reqs * num_rows
        shape, weights = model.shape, [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        x = torch.randn(num, shape.hidden_size).bfloat16()
        qkv = torch.randn(num, heads + 2 * kv_heads, shape.head_dim).bfloat16()
        gate_up = torch.randn(num, 2 * shape.intermediate_size).bfloat16()
        tables = model.rotary.tables(torch.arange(num), torch.bfloat16)
        spans = [Span(self.rows[i], CONTEXT + i % 7, num_rows, i * num_rows) for i in range(num_reqs)]
        place = self.pool.split(self.tables.slots(self.rows[0], 0, MAX_PAGES * PAGE_SIZE)[:num])

        def attend() -> None:
            plan = PagedAttention(self.pool, self.tables, spans, heads, qkv.dtype)
            for layer in range(len(weights)):
                plan.run(layer, qkv[:, :heads])

        def activate() -> None:
            kernels = layers.kernels_for(gate_up)
            for _ in weights:
                if kernels is None:
                    gate, up = gate_up.chunk(2, dim=-1)
                    F.silu(gate).mul_(up)
                else:
                    kernels.silu_mul(gate_up)

        def write() -> None:
            for layer in range(len(weights)):
                self.pool.write_at(layer, place, qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :])

        return {
            "attention": attend,
            "norm": lambda: [layer.input_norm(x) for layer in weights],
            "add_and_norm": lambda: [layer.post_norm.after(x, x) for layer in weights],
            "silu_mul": activate,
            "rotate": lambda: [model.rotary.rotate(qkv[:, : heads + kv_heads], tables) for _ in weights],
            "write_kv": write,
        }


def linears(model: Decoder, num: int) -> Callable[[], object]:
    """All matrix products of a step, which both sides leave to torch."""
    shape, weights = model.shape, [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
    x = torch.randn(num, shape.hidden_size).bfloat16()
    attended = torch.randn(num, shape.num_heads * shape.head_dim).bfloat16()
    wide = torch.randn(num, shape.intermediate_size).bfloat16()

    def run() -> None:
        for layer in weights:
            layer.qkv(x), layer.o(attended), layer.mlp.gate_up(x), layer.mlp.down(wide)
        model.head(x)

    return run


def main() -> None:
    """Everything, on so many threads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load()
    assert loaded is not None, "the kernels are not built, or not for this CPU"
    target = Target(options.model)
    print(json.dumps({"attention": loaded.attention, "torch": torch.__version__, "context": CONTEXT}))
    with torch.inference_mode():
        for name, (num_reqs, num_rows) in FORWARDS.items():
            compare(f"forward {name}", target.forward(num_reqs, num_rows), calls=3, turns=options.turns)
        for name in ("1x1", "32x1", "32x4"):
            for kernel, run in target.kernels(*FORWARDS[name]).items():
                compare(f"{kernel} {name}", run, calls=5, turns=options.turns)
            num = FORWARDS[name][0] * FORWARDS[name][1]
            compare(f"linear {name}", linears(target.model, num), calls=3, turns=options.turns)


if __name__ == "__main__":
    main()
