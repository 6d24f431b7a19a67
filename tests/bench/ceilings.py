"""What this device reaches now: `python -m tests.bench.ceilings` prints one JSON line.

One H200 is not like the other, and none is when it is hot: large bf16 products went at 685 to 760 TFLOP/s on the
machines that figures here come from. So benches keep these two figures beside theirs.
"""

import json
import subprocess
import sys

import torch


def ceilings() -> dict[str, float]:
    """Bytes that a kernel reads and writes much of moves, and the rate of a large GEMM of random numbers."""
    from tests.bench.rows import graph_us

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    gemm_us = graph_us([lambda: a @ b] * 4)
    x = torch.randn(1 << 28, device="cuda")
    y = torch.empty_like(x)
    copy_us = graph_us([lambda: torch.add(x, 1.0, out=y)] * 4)
    return {"copy_gb_s": round(2 * x.nbytes / copy_us / 1e3), "gemm_tflops": round(2 * 8192**3 / gemm_us / 1e6)}


def ceilings_apart() -> dict[str, float]:
    """The same from a process of its own, which leaves no memory taken. Raises RuntimeError with what it said."""
    command = [sys.executable, "-m", "tests.bench.ceilings"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"no ceilings: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        print("tests.bench.ceilings finds no CUDA device: nothing was measured", file=sys.stderr)
        sys.exit(1)
    print(json.dumps(ceilings()))
