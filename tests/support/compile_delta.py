"""`python -m tests.support.compile_delta [COLUMNS WARPS]...`: what the delta net's kernels need on Hopper, as JSON.

At the sizes of the models, a line for each kernel. A process of its own, in which kernels are not interpreted. Needs
no GPU.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "0"

import torch

from memsvc.device.kernels.delta_memory import move_states
from memsvc.device.kernels.delta_site import DeltaSite, DeltaTile
from memsvc.device.kernels.delta_verify import FEW, MANY, delta_verify
from target_worker.model.linear_spec import LinearSpec
from tests.support import delta_models
from tests.support.compiled_kernel import registers_and_stack
from tests.support.kernel_compiler import Compiled, compile_only


def compile_tile(spec: LinearSpec, tile: DeltaTile) -> list[Compiled]:
    """The kernels of a step."""
    memory = delta_models.memory_of(spec, 2, 2, "cpu")
    rows = delta_models.steady_rows(2, "cpu")
    raw, gates = delta_models.inputs_of(spec, rows.num_rows, "cpu")
    conv = torch.empty(spec.conv_kernel, spec.conv_dim)
    with compile_only() as kernels:
        delta_verify(raw, gates, rows, DeltaSite(memory=memory, layer=1, conv=conv, tile=tile))
        move_states(rows, memory)
    return kernels


def main() -> None:
    """Compile with each tile that is named, else with those that are used."""
    numbers = [int(word) for word in sys.argv[1:]]
    tiles = [DeltaTile(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)] or [FEW, MANY]
    for name, spec in delta_models.MODELS.items():
        for tile in tiles:
            for kernel in compile_tile(spec, tile):
                registers, spilled = registers_and_stack(kernel.cubin)
                found = {
                    "model": name, "kernel": kernel.name, "tile": tile, "registers": registers,
                    "spilled": spilled, "shared": kernel.shared_bytes, "read_bytes": kernel.widest("ld"),
                    "write_bytes": kernel.widest("st"),
                }  # fmt: skip
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
