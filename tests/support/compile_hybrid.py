"""`python -m tests.support.compile_hybrid`: what a hybrid target's kernels around its recurrence need on Hopper, as JSON.

At the sizes of the models, a line for each kernel. A process of its own, in which kernels are not interpreted. Needs
no GPU.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "0"

import torch

from memsvc.device.kernels.delta_gates import delta_gates, gated_norm
from memsvc.device.kernels.delta_inputs import TILED_ROWS, SequenceInputs, Sequences
from memsvc.device.layers import GatedRMSNorm
from target_worker.model.linear_spec import LinearSpec
from tests.support import delta_models
from tests.support.compiled_kernel import registers_and_stack
from tests.support.kernel_compiler import Compiled, compile_only


def main() -> None:
    """Compile all of them."""
    for name, spec in delta_models.MODELS.items():
        for kernel in compiled(spec):
            registers, spilled = registers_and_stack(kernel.cubin)
            found = {
                "model": name, "kernel": kernel.name, "registers": registers, "spilled": spilled,
                "read_bytes": kernel.widest("ld"), "write_bytes": kernel.widest("st"),
            }  # fmt: skip
            print(json.dumps(found), flush=True)


def compiled(spec: LinearSpec) -> list[Compiled]:
    """Rows of two prompts, as PromptStep has them: short ones are convolved row by row, longer ones in tiles."""
    num_rows = 2 * TILED_ROWS
    memory = delta_models.memory_of(spec, 2, 2, "cpu")
    width = spec.conv_dim + spec.value_size + 2 * spec.gate_width
    proj = torch.zeros(num_rows, width, dtype=torch.bfloat16)
    raw, z, b, a = proj.split([spec.conv_dim, spec.value_size, spec.gate_width, spec.gate_width], dim=-1)
    heads, ones = spec.num_v_heads, torch.ones(spec.gate_width)
    places = torch.zeros(num_rows, dtype=torch.int64)
    sequences = Sequences(facts=torch.zeros(4, 2, dtype=torch.int64), owners=places, positions=places)
    norm = GatedRMSNorm(torch.ones(spec.v_dim, dtype=torch.bfloat16), 1e-6)
    with compile_only() as kernels:
        gates = delta_gates(b[:, :heads], a[:, :heads], ones, ones)
        inputs = SequenceInputs(
            memory=memory, layer=1, conv=torch.ones(spec.conv_kernel, spec.conv_dim), raw=raw, gates=gates
        )
        for dtype in (torch.bfloat16, torch.float32):
            for num in (num_rows // 2, num_rows):
                inputs.convolved(sequences, slice(0, num), dtype)
        inputs.gathered(sequences)
        for dtype in (torch.bfloat16, torch.float32):
            out = torch.zeros(num_rows, heads, spec.v_dim, dtype=dtype)
            gated_norm(out, z.unflatten(1, (heads, spec.v_dim)), norm)
    return kernels


if __name__ == "__main__":
    main()
