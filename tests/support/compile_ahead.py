"""Compiles kernels that ask for a weight ahead for Hopper, and prints as JSON how often each asks: for test_ahead.

A process of its own, in which kernels are not interpreted. Needs no GPU.
"""

import json
import os
import re

os.environ["TRITON_INTERPRET"] = "0"

import torch

from memsvc.device.kernels import ahead, mlp, norm
from memsvc.device.layers import RMSNorm
from tests.support.kernel_compiler import compile_only

PREFETCH = re.compile(r"cp\.async\.bulk\.prefetch\.L2\.global \[%rd\d+\], %r\d+")


def main() -> None:
    """name -> asks of the kernel's PTX, in the order of compiling: without a weight, with one."""
    x = torch.empty(9, 4096, dtype=torch.bfloat16)
    plain, gate_up = RMSNorm(x[0], 1e-6), torch.empty(9, 2048, dtype=torch.bfloat16)
    found: dict[str, list[int]] = {}
    for operands in ((None, 0), (torch.empty(1 << 20, dtype=torch.bfloat16), 2 << 20)):
        ahead.operands = lambda weight, operands=operands: operands
        with compile_only() as kernels:
            norm.rms_norm(x, plain, x)
            mlp.silu_mul(gate_up, ahead=x)
        for kernel in kernels:
            found.setdefault(kernel.name, []).append(len(PREFETCH.findall(kernel.ptx)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
