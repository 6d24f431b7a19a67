"""A GEMM of few rows before a norm, whole and in parts of k: `python -m tests.bench.gemm_parts --json FILE` (CUDA).

Times are of the product and the norm that follows it (memsvc/device/linear.py), captured many times into a graph over
weights that are together more than the L2 cache holds. floor_us: the weight's bytes over the bandwidth that a large
copy reaches in the same run. How many parts there are, and up to how many rows, is decided by these figures.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from memsvc.device.kernels.norm import add_rms_norm
from memsvc.device.layers import RMSNorm
from memsvc.device.linear import product_in_parts
from tests.bench.rows import copy_bytes_per_us, graph_us

MATRICES = {
    "8b o": (4096, 4096),
    "8b down": (4096, 12288),
    "8b drafter fc": (4096, 20480),
    "27b o": (5120, 6144),
    "27b down": (5120, 17408),
    "27b drafter o": (5120, 4096),
    "27b drafter fc": (5120, 25600),
}
"""name -> outputs, k"""
ROWS = (9, 18, 36, 72, 144, 288, 432, 576)
PARTS = (2, 4)
_COLD_BYTES = 220 << 20
_LAUNCHES = 8


def measure(name: str, num_rows: int, bytes_per_us: float) -> dict[str, Any]:
    """A row of the table."""
    outputs, k = MATRICES[name]
    copies = max(2, min(8, -(-_COLD_BYTES // (2 * outputs * k))))
    weights = [torch.randn(outputs, k, device="cuda", dtype=torch.bfloat16) * k**-0.5 for _ in range(copies)]
    rows = [torch.randn(num_rows, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    residual = torch.randn(num_rows, outputs, device="cuda", dtype=torch.bfloat16)
    norm = RMSNorm(torch.ones(outputs, device="cuda", dtype=torch.bfloat16), 1e-6)

    def timed(num_parts: int) -> float:
        def call(i: int) -> None:
            x, weight = rows[i % copies], weights[i % copies]
            whole = x @ weight.T if num_parts == 1 else product_in_parts(x, weight, num_parts)
            add_rms_norm(whole, residual, norm)

        return round(graph_us([lambda i=i: call(i) for i in range(max(copies, _LAUNCHES))]), 2)

    return {
        "matrix": name, "outputs": outputs, "k": k, "rows": num_rows, "floor_us": round(2 * outputs * k / bytes_per_us, 2),
        "whole_us": timed(1), "parts_us": {num: timed(num) for num in PARTS},
    }  # fmt: skip


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gemm_parts", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("tests.bench.gemm_parts finds no CUDA device: nothing was measured", file=sys.stderr)
        return 1
    bytes_per_us, found = copy_bytes_per_us(), []
    for name in MATRICES:
        for num_rows in ROWS:
            found.append(measure(name, num_rows, bytes_per_us))
            row = found[-1]
            parts = " ".join(f"{num}: {us:7.2f}" for num, us in row["parts_us"].items())
            print(
                f"{name:16} rows {num_rows:4} floor {row['floor_us']:7.2f} whole {row['whole_us']:7.2f} parts {parts}"
            )
    if args.json:
        facts = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "copy_gb_s": round(bytes_per_us / 1e3),
        }
        args.json.write_text(json.dumps({"rows": found} | facts, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
