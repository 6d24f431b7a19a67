"""Device times of sampling, top-k, accept and the selector walk: `python -m tests.bench.sampling --json`.

Each is captured in a CUDA graph and replayed; the figure is the median over rounds of replays that take turns on
several sets of logits, together larger than the L2 cache. Beside it the floor, bytes of the logits over the bandwidth
given, and torch's own topk and argmax. --tiles also times variants of the sizes in the tables of the kernels.
--compile times nothing: it compiles the kernels for Hopper, for which no GPU is needed, and says how wide they read.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from memsvc.device.row_sampler import RowSampler
from memsvc.device.slots import SlotState, SlotWriter
from memsvc.slot_layout import SlotLayout
from memsvc.wire.text import Sampling

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "top_k_top_p": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.1, "presence_penalty": 0.5},
}
_SET_BYTES = 160 << 20
"""Logits of all sets together: three times the L2 cache of an H200."""


def device_us(work: Callable[[int], object], num_sets: int, rounds: int = 15) -> float:
    """Median microseconds of work(i), over graphs that run it once for each set i."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for index in range(num_sets):
            work(index)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(num_sets):
            work(index)
    times = []
    for _ in range(rounds):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1e3 / num_sets)
    return round(statistics.median(times), 2)


def logit_sets(rows: int, vocab: int, spread: float) -> list[torch.Tensor]:
    """bf16 [rows, vocab] as often as it takes to leave the cache. spread 1 is flat; real models are near 3."""
    num_sets = max(1, -(-_SET_BYTES // (2 * rows * vocab)))
    return [(torch.randn(rows, vocab, device="cuda") * spread).bfloat16() for _ in range(num_sets)]


def opened(
    num: int, block_size: int, vocab: int, kind: dict[str, Any], device: str = "cuda"
) -> tuple[SlotState, torch.Tensor]:
    """Slots of num requests, and their members."""
    layout = SlotLayout(num, block_size, vocab)
    slots = SlotState(layout, torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device))
    slots.reset()
    writer = SlotWriter(slots)
    for slot in range(1, num + 1):
        sampling = Sampling(seed=slot, max_tokens=1 << 30, **kind)
        prompt = list(range(7 * slot, 7 * slot + 500))
        writer.open(slot, RowSampler(sampling, eos_ids=[], prompt=prompt, output=[5]), length=500)
    writer.flush(lambda values: torch.from_numpy(values).to(device))
    return slots, torch.arange(1, num + 1, dtype=torch.int32, device=device)


class Bench:
    """One size of batch."""

    def __init__(self, args: argparse.Namespace, num: int) -> None:
        self.args, self.num, self.rows = args, num, num * args.block_size
        self.sets = logit_sets(self.rows, args.vocab, args.spread)
        self.floor_us = round(2 * self.rows * args.vocab / args.bandwidth * 1e6, 2)

    def row(self, what: str, work: Callable[[int], object], **more: object) -> dict[str, object]:
        """One figure."""
        found = device_us(work, len(self.sets))
        print(f"{what:32} requests={self.num:3} rows={self.rows:4} {found:9.2f} us", file=sys.stderr, flush=True)
        return {"what": what, "requests": self.num, "rows": self.rows, "us": found, "floor_us": self.floor_us} | more

    def run(self) -> list[dict[str, object]]:
        """All figures."""
        from memsvc.device.kernels.top_k import top_k

        found = [
            self.row("torch.argmax", lambda i: self.sets[i].argmax(-1)),
            self.row("torch.topk 16", lambda i: self.sets[i].topk(16)),
            self.row("top_k 16", lambda i: top_k(self.sets[i], 16)),
            self.row("top_k 1", lambda i: top_k(self.sets[i], 1)),
            *(self._sampling(name) for name in KINDS),
            *self._steps(),
        ]
        return [*found, *self._tiles()] if self.args.tiles else found

    def _sampling(self, name: str, **sizes: Any) -> dict[str, object]:
        from memsvc.device.kernels.sample import TILE, SampleScratch, sample_rows_device

        slots, members = opened(self.num, self.args.block_size, self.args.vocab, KINDS[name])
        scratch = SampleScratch(self.rows, self.args.vocab, "cuda", tile=replace(TILE, **sizes))
        return self.row(f"sample {name}", lambda i: sample_rows_device(self.sets[i], members, slots, scratch), **sizes)

    def _steps(self) -> list[dict[str, object]]:
        """What does not read logits: its floor is a launch."""
        from memsvc.device.kernels.accept import accept
        from memsvc.device.kernels.select_walk import SelectorTables, select_walk

        num, k, rank = self.num, self.args.block_size - 1, 256
        tables = [torch.randn(self.args.vocab, rank, device="cuda").bfloat16() for _ in range(2)]
        hidden = torch.randn(num, k, rank, device="cuda").bfloat16()
        ids = torch.rand(num * k, self.args.vocab, device="cuda").topk(16).indices.int().view(num, k, 16)
        unary = torch.randn(num, k, 16, device="cuda")
        tokens = torch.randint(0, self.args.vocab, (num, k + 1), device="cuda").int()
        found = []
        for name in ("greedy", "sampled", "top_k_top_p"):
            slots, members = opened(num, k + 1, self.args.vocab, KINDS[name])
            step = (unary, ids, members, slots, SelectorTables(hidden, *tables))
            found.append(self.row(f"select_walk {name}", lambda _, step=step: select_walk(*step)))
        slots, members = opened(num, k + 1, self.args.vocab, KINDS["sampled"])
        return [*found, self.row("accept", lambda _: accept(tokens, members, slots))]

    def _tiles(self) -> list[dict[str, object]]:
        from memsvc.device.kernels.top_k import TILE, top_k

        found = []
        for group, groups, warps in product((64, 128, 256), (32, 64), (2, 4, 8)):
            tile = replace(TILE, group=group, groups=groups * 128 // group, pick_warps=warps)
            sizes = {"group": group, "groups": tile.groups, "pick_warps": warps}
            found.append(self.row("top_k 16", lambda i, tile=tile: top_k(self.sets[i], 16, tile=tile), **sizes))
        for blocks, width, warps in product((16, 32, 64), (64, 128), (4, 8)):
            sizes = {"summary_blocks": blocks, "summary_width": width, "summary_warps": warps}
            found.append(self._sampling("greedy", **sizes))
        for splits, warps in product((1, 2, 4, 8, 16), (2, 4)):
            sizes = {"max_splits": splits, "split_programs": 1 << 30, "race_warps": warps}
            found.append(self._sampling("sampled", **sizes))
        for room, warps in product((2048, 4096), (8, 16)):
            found.append(self._sampling("top_p", cut_room=room, cut_warps=warps))
        return found


def compiled(vocab: int, block_size: int) -> list[dict[str, object]]:
    """Every kernel as one request launches it, in a process that does not interpret kernels."""
    from memsvc.device.kernels.accept import accept
    from memsvc.device.kernels.sample import SampleScratch, sample_rows_device
    from memsvc.device.kernels.select_walk import SelectorTables, select_walk
    from memsvc.device.kernels.top_k import top_k
    from tests.support.kernel_compiler import compile_only

    slots, members = opened(1, block_size, vocab, {}, "cpu")
    logits = torch.zeros(block_size, vocab, dtype=torch.bfloat16)
    with compile_only() as kernels:
        sample_rows_device(logits, members, slots, SampleScratch(block_size, vocab, "cpu"))
        unary, ids = top_k(logits[1:], 16)
        blocks = unary.view(1, -1, 16), ids.view(1, -1, 16)
        tables = torch.empty(vocab, 256, dtype=torch.bfloat16)
        hidden = torch.empty(1, block_size - 1, 256, dtype=torch.bfloat16)
        select_walk(*blocks, members, slots, SelectorTables(hidden, tables, tables))
        select_walk(*blocks, members, slots)
        accept(torch.zeros(1, block_size, dtype=torch.int32), members, slots)
        accept(torch.zeros(1, 1, dtype=torch.int32), members, slots, simulate=4.0, feature_base=None)
    return [{"name": k.name, "read_bytes": k.widest("ld"), "shared_bytes": k.shared_bytes} for k in kernels]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--requests", default="1,8,32", help="numbers of requests, with commas")
    parser.add_argument("--block-size", type=int, default=9)
    parser.add_argument("--vocab", type=int, default=248_320)
    parser.add_argument("--spread", type=float, default=3.0, help="standard deviation of the logits")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes a second, for the floor")
    parser.add_argument("--tiles", action="store_true", help="time variants of the kernels' sizes as well")
    parser.add_argument("--compile", action="store_true", help="compile only; needs TRITON_INTERPRET=0")
    args = parser.parse_args()
    if args.compile:
        print(json.dumps({"rows": compiled(args.vocab, args.block_size)}))
        return
    if not torch.cuda.is_available():
        parser.exit(1, "tests.bench.sampling times CUDA kernels and finds no CUDA device: nothing was measured\n")
    rows = [row for num in args.requests.split(",") for row in Bench(args, int(num)).run()]
    if args.json:
        print(json.dumps({"rows": rows, "device": torch.cuda.get_device_name(), "spread": args.spread}))


if __name__ == "__main__":
    main()
