"""What the attention benchmark runs: geometries, contexts in a page-major arena, and the time of a graph's replay."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from memsvc.device.attention_backends import AttentionCase, Use
from memsvc.device.flashinfer_prefill import FLASHINFER, WORKSPACE_BYTES, FlashInferPrefill
from memsvc.device.kernels.attention_tiles import AttentionScratch, Tile
from memsvc.device.kernels.block_attention import Context, block_attention
from memsvc.device.kernels.prefill_attention import PrefillPlan, prefill_attention
from target_worker.attention import Span

BYTES_PER_US = 4.3e6
"""What a device-to-device copy moves on an H200, read and written together."""
_COLD_BYTES = 150 << 20
"""Replays take turns over so many bytes of keys and values: three times the L2 cache of an H200."""
_MAX_SETS = 8
_REPEATS = 40
PAGE = 16


@dataclass(frozen=True, slots=True)
class Geometry:
    """Heads of the layers of one forward, and the rows a request."""

    num_heads: int
    num_kv_heads: int
    dim: int
    num_rows: int
    num_layers: int
    causal: bool
    window: int = 0

    @property
    def token_bytes(self) -> int:
        """Keys and values of a position in one layer."""
        return 2 * self.num_kv_heads * self.dim * 2

    @property
    def row_shape(self) -> tuple[int, int]:
        """(rows of a key-value head, head_dim)."""
        return self.num_rows * self.num_heads // self.num_kv_heads, self.dim

    def case(self, use: Use) -> AttentionCase:
        """As the choice of a backend sees it, on this machine's device."""
        return AttentionCase(
            use=use, device="cuda", dtype=torch.bfloat16, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads,
            head_dim=self.dim, page_size=PAGE, num_rows=self.num_rows, causal=self.causal, window=self.window,
            capability=torch.cuda.get_device_capability()[0],
        )  # fmt: skip


GEOMETRIES = {
    "draft-9": Geometry(32, 8, 128, 9, 5, causal=False),
    "draft-8": Geometry(32, 8, 128, 8, 5, causal=False),
    "draft-8-window": Geometry(32, 8, 128, 8, 5, causal=False, window=2048),
    "verify-8b": Geometry(32, 8, 128, 9, 4, causal=True),
    "verify-27b": Geometry(24, 4, 256, 9, 4, causal=True),
    "smollm2": Geometry(9, 3, 64, 8, 4, causal=True),
}


@dataclass(frozen=True, slots=True)
class Load:
    """Some requests of equal context, in sets with pages of their own."""

    geometry: Geometry
    num_reqs: int
    context_len: int
    arena: torch.Tensor
    """[pages, layers, 2, PAGE, kv_heads, d]"""
    table: torch.Tensor
    """int32 [1 + sets * num_reqs, pages a request], on the host."""
    num_sets: int

    @property
    def floor_us(self) -> float:
        """All keys and values of the context read once, in all layers."""
        seen = min(self.context_len, self.geometry.window or self.context_len)
        return self.num_reqs * seen * self.geometry.token_bytes * self.geometry.num_layers / BYTES_PER_US

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer."""
        return self.arena[:, layer, 0], self.arena[:, layer, 1]

    def context(self, which: int) -> Context:
        """Of one set."""
        first = 1 + which * self.num_reqs
        lengths = torch.full((len(self.table),), self.context_len, dtype=torch.int32, device="cuda")
        members = torch.arange(first, first + self.num_reqs, dtype=torch.int32, device="cuda")
        return Context(self.table.cuda(), members, torch.zeros_like(lengths), lengths)

    def spans(self, which: int) -> list[Span]:
        """Of one set, the block's rows being the newest positions of the context."""
        num = self.geometry.num_rows
        first = 1 + which * self.num_reqs
        return [Span(first + i, self.context_len - num, num, i * num) for i in range(self.num_reqs)]


def make_load(geometry: Geometry, num_reqs: int, context_len: int) -> Load:
    """Random keys and values in shuffled pages."""
    each = -(-context_len // PAGE)
    bytes_a_set = num_reqs * each * PAGE * geometry.token_bytes * geometry.num_layers
    num_sets = max(2, min(_MAX_SETS, -(-_COLD_BYTES // bytes_a_set)))
    rows = num_sets * num_reqs
    form = (1 + rows * each, geometry.num_layers, 2, PAGE, geometry.num_kv_heads, geometry.dim)
    arena = torch.randn(form, dtype=torch.bfloat16, device="cuda")
    table = torch.zeros((1 + rows, each), dtype=torch.int32)
    table[1:] = (torch.randperm(rows * each) + 1).int().view(rows, each)
    return Load(geometry, num_reqs, context_len, arena, table, num_sets)


def replay_us(make_call: Callable[[int], Callable[[], object]], num_sets: int) -> float:
    """Median time of one replay, sets taking turns. make_call: what is captured for a set, made before the capture."""
    graphs = []
    for which in range(num_sets):
        call = make_call(which)
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graphs.append((graph, call))
    events = []
    for repeat in range(_REPEATS + num_sets):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graphs[repeat % num_sets][0].replay()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events[num_sets:]) * 1e3


def triton_us(load: Load, tile: Tile | None) -> float:
    """block_attention in all layers, with a tile or with the table's."""
    geometry = load.geometry
    rows = (load.num_reqs, geometry.num_rows)
    q, k, v = (
        torch.randn(*rows, heads, geometry.dim, dtype=torch.bfloat16, device="cuda")
        for heads in (geometry.num_heads, geometry.num_kv_heads, geometry.num_kv_heads)
    )
    scratch = AttentionScratch(load.num_reqs, geometry.num_rows, geometry.num_heads, geometry.dim, 1100, "cuda")
    scratch.tile = tile
    out = torch.empty_like(q)

    def make_call(which: int) -> Callable[[], object]:
        context = load.context(which)

        def call() -> None:
            for layer in range(geometry.num_layers):
                block_attention(
                    q, k, v, *load.pages(layer), context, causal=geometry.causal, window=geometry.window,
                    scratch=scratch, out=out,
                )  # fmt: skip

        return call

    return replay_us(make_call, load.num_sets)


def flashinfer_us(load: Load, kernel: str) -> float | None:
    """FlashInfer's planned prefill in all layers, the plan not counted. None if it can't."""
    geometry = load.geometry
    case = geometry.case(Use.EAGER)
    if FLASHINFER[kernel].refusals(case):
        return None
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    q = torch.randn(
        load.num_reqs * geometry.num_rows, geometry.num_heads, geometry.dim, dtype=torch.bfloat16, device="cuda"
    )

    def make_call(which: int) -> Callable[[], object]:
        prefill = FlashInferPrefill(case, workspace, kernel=kernel)
        prefill.plan(load.spans(which), load.table)
        return lambda: [prefill.run(q, load.pages(layer)) for layer in range(geometry.num_layers)]

    return replay_us(make_call, load.num_sets)


def triton_prefill_us(load: Load, tile: Tile | None) -> float:
    """prefill_attention in all layers."""
    geometry = load.geometry
    q = torch.randn(
        load.num_reqs * geometry.num_rows, geometry.num_heads, geometry.dim, dtype=torch.bfloat16, device="cuda"
    )
    table = load.table.cuda()

    def make_call(which: int) -> Callable[[], object]:
        plan = PrefillPlan.of(load.spans(which), geometry.num_heads // geometry.num_kv_heads, "cuda")
        return lambda: [
            prefill_attention(q, load.pages(layer), table, plan, window=geometry.window, tile=tile)
            for layer in range(geometry.num_layers)
        ]

    return replay_us(make_call, load.num_sets)
