"""What the row kernels between GEMMs cost: `python -m tests.bench.rows --json` (on a CUDA device).

Each kernel is captured many times into one CUDA graph, on buffers of its own as a forward has them, and the graph is
replayed: device_us is one launch of it. Beside it: the bytes it has to move, and floor_us, those bytes over the
bandwidth that a large copy reaches on this device in this run. Small kernels end at launch_us, an empty one's time.
`--compile` needs no GPU: it compiles every kernel for Hopper and says how wide its accesses are.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import triton

from memsvc.device.kernels.norm import rms_norm
from memsvc.device.layers import RMSNorm
from tests.bench.row_cases import GEOMETRIES, Case, make_cases

LAUNCHES = 20
"""Of one kernel in a graph."""
REPLAYS = 30
COPY_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table."""

    kernel: str
    geometry: str
    concurrency: int
    rows: int
    bytes: int
    device_us: float
    floor_us: float


def graph_us(calls: list[Callable[[], object]]) -> float:
    """Device time of one of these calls, captured behind each other; median over replays."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(REPLAYS):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(found)


def copy_bytes_per_us() -> float:
    """What a large elementwise kernel reaches, bytes read and written; a plain copy may go to a copy engine instead.

    Of 32-bit numbers: on an H200 torch moves 4.2 TB/s of them, 3.35 of 8-bit ones.
    """
    source = torch.empty(COPY_BYTES // 4, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / graph_us([lambda: torch.bitwise_not(source, out=target)] * 4)


def launch_us() -> float:
    """A kernel of one row of one element."""
    one = torch.ones(1, 1, device="cuda")
    norm = RMSNorm(one[0], 1e-6)
    return graph_us([lambda: rms_norm(one, norm)] * LAUNCHES)


def measure(concurrencies: list[int]) -> dict[str, object]:
    """All kernels of all geometries."""
    bandwidth = copy_bytes_per_us()
    rows = []
    for geometry in GEOMETRIES:
        for num in concurrencies:
            # Buffers in turn, as the layers of a forward have them.
            sets = [make_cases(geometry, num, "cuda") for _ in range(4)]
            for index, case in enumerate(sets[0]):
                calls = [sets[i % len(sets)][index].call for i in range(LAUNCHES)]
                rows.append(asdict(_row(case, geometry, num, graph_us(calls), bandwidth)))
    return {
        "rows": rows,
        "launch_us": round(launch_us(), 2),
        "device": torch.cuda.get_device_name(),
        "copy_gb_s": round(bandwidth / 1e3),
        "triton": triton.__version__,
    }


def _row(case: Case, geometry: str, num: int, device_us: float, bandwidth: float) -> Row:
    return Row(
        kernel=case.name, geometry=geometry, concurrency=num, rows=case.num_rows, bytes=case.num_bytes,
        device_us=round(device_us, 2), floor_us=round(case.num_bytes / bandwidth, 2),
    )  # fmt: skip


def compiled() -> dict[str, object]:
    """Every kernel compiled for Hopper: bytes a thread of its widest read and write."""
    from tests.support.kernel_compiler import compile_only

    rows = []
    for geometry in GEOMETRIES:
        with compile_only() as found:
            cases = make_cases(geometry, 2, "cpu")
            for case in cases:
                before = len(found)
                case.call()
                assert len(found) == before + 1, f"{case.name} launched {len(found) - before} kernels"
        for case, kernel in zip(cases, found, strict=True):
            rows.append(
                {
                    "kernel": case.name, "geometry": geometry, "read_bytes": kernel.widest("ld"),
                    "write_bytes": kernel.widest("st"), "warps": kernel.num_warps, "shared_bytes": kernel.shared_bytes,
                }
            )  # fmt: skip
    return {"rows": rows}


def show(result: dict[str, object]) -> None:
    """The rows as a table, the rest below it."""
    rows = result.pop("rows")
    assert isinstance(rows, list)
    names = list(rows[0])
    print(" | ".join(names))
    for row in rows:
        print(" | ".join(str(row[name]) for name in names))
    print(result)


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="1,8,32", help="numbers of requests, each with a block of rows")
    parser.add_argument("--compile", action="store_true", help="compile for Hopper and run nothing")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    arguments = parser.parse_args()
    if not arguments.compile and not torch.cuda.is_available():
        print("tests.bench.rows needs a GPU: there is no CUDA device here (--compile works without)", file=sys.stderr)
        return 2
    result = compiled() if arguments.compile else measure([int(n) for n in arguments.concurrency.split(",")])
    if arguments.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
