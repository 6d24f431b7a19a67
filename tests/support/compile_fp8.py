"""`python -m tests.support.compile_fp8`: what the kernels that round rows to fp8 need on Hopper, as JSON.

At the sizes of the models, a line for each kernel. A process of its own, in which kernels are not interpreted. Needs
no GPU.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "0"

import torch

from memsvc.device.kernels.fp8_rows import quantise_rows
from memsvc.device.kernels.mlp import silu_mul_fp8
from memsvc.device.kernels.norm import add_rms_norm_fp8
from memsvc.device.layers import RMSNorm
from tests.support.compiled_kernel import registers_and_stack
from tests.support.kernel_compiler import compile_only

SIZES = ((4096, 12288, 4096), (5120, 17408, 6144))
"""Width of the residual stream, of the MLP and of what attention gives, of the 8B and the 27B model."""
_ROWS = 9


def main() -> None:
    """Compile all of them."""
    with compile_only() as kernels:
        for hidden, wide, heads in SIZES:
            x, residual, gate_up, out = (
                torch.zeros(_ROWS, width, dtype=torch.bfloat16) for width in (hidden, hidden, 2 * wide, heads)
            )
            add_rms_norm_fp8(x, residual, RMSNorm(torch.ones(hidden, dtype=torch.bfloat16), 1e-6))
            silu_mul_fp8(gate_up)
            quantise_rows(out)
    for kernel in kernels:
        registers, spilled = registers_and_stack(kernel.cubin)
        found = {
            "kernel": kernel.name, "registers": registers, "spilled": spilled, "read_bytes": kernel.widest("ld"),
            "write_bytes": kernel.widest("st"), "is_cut_off": "satfinite.e4m3" in kernel.ptx,
        }  # fmt: skip
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
