"""`python -m tests.support.compile_skinny`: what products of few rows need on Hopper, a line of JSON a kernel."""

import json
import re
from dataclasses import replace
from typing import Any

from memsvc.device.kernels import launch, skinny_gemm
from memsvc.device.kernels.skinny_tiles import MULTIPROCESSORS, SkinnyPlan
from memsvc.device.linear_backends import GATED, NORM
from tests.bench.skinny_cases import Operands, Product
from tests.support.compiled_kernel import registers_and_stack
from tests.support.kernel_compiler import Compiled, compile_only

QKV, DOWN = Product(6144, 4096), Product(4096, 12288, NORM)
GATE_UP, HEAD = Product(24576, 4096, GATED), Product(151936, 4096)

_FEW, _MANY = SkinnyPlan(64, 128), SkinnyPlan(128, 64, num_warps=8)
_STREAMED = SkinnyPlan(64, 128, streams=2)
_COPY = r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], 0x([0-9a-f]+)"

CASES = {
    "qkv 9 split": (QKV, 9, replace(_FEW, splits=4)),
    "qkv 9 through registers": (QKV, 9, SkinnyPlan(32, 128, num_stages=5)),
    "qkv 72 split": (QKV, 72, replace(_MANY, splits=6)),
    "qkv 72 wide": (QKV, 72, replace(_MANY, block_n=256, splits=12, tma=True)),
    "qkv 9 streamed": (QKV, 9, _STREAMED),
    "qkv 9 streamed tma": (QKV, 9, replace(_STREAMED, tma=True)),
    "gate_up 9": (GATE_UP, 9, _FEW),
    "gate_up 9 streamed": (GATE_UP, 9, replace(_STREAMED, block_k=64)),
    "gate_up 72 split": (GATE_UP, 72, replace(_MANY, splits=2)),
    "down 9": (DOWN, 9, replace(_FEW, splits=4)),
    "down 72 streamed": (DOWN, 72, replace(_MANY, streams=1, num_stages=6)),
    "head 18 tma": (HEAD, 18, replace(_FEW, tma=True)),
    "head 144": (HEAD, 144, _MANY),
}
"""Name -> a product, rows, a plan: every kernel, both ways to load, every tile of rows, every ending."""


def facts(name: str, kernel: Compiled) -> dict[str, Any]:
    """What one kernel needs, and how its operands come in."""
    registers, stack = registers_and_stack(kernel.cubin)
    ptx = kernel.ptx
    loads = [match.start() for match in re.finditer(r"cp\.async\.(c[ag]\.shared|bulk\.tensor)", ptx)]
    wait = ptx.find("griddepcontrol.wait")
    return {
        "case": name,
        "kernel": kernel.name,
        "registers": registers,
        "stack_bytes": stack,
        "shared_bytes": kernel.shared_bytes,
        "copy_bytes": min((int(size, 16) for size in re.findall(_COPY, ptx)), default=16),
        "tensor_copies": ptx.count("cp.async.bulk.tensor"),
        "prefetched_before_waiting": -1 < ptx.find("cp.async.bulk.prefetch.L2") < wait,
        "loaded_after_waiting": bool(loads) and -1 < wait < min(loads),
        "matrix_unit": "wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else "none",
        "write_bytes": kernel.widest("st"),
    }


def main() -> None:
    """Compile all, with overlap on: it is what needs the most."""
    launch.OVERLAP = True
    # A plan's cut follows the device; here there is none.
    skinny_gemm.num_multiprocessors = lambda device: MULTIPROCESSORS
    for name, (product, m, plan) in CASES.items():
        operands = Operands(product, "cpu")
        with compile_only() as found:
            operands.run(plan, operands.fill(m, product.k), operands.epilogue(m))
        for kernel in found:
            print(json.dumps(facts(name, kernel)), flush=True)


if __name__ == "__main__":
    main()
