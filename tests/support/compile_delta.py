"""`python -m tests.support.compile_delta [COLUMNS WARPS]...`: what the delta net's kernels need on Hopper, as JSON.

At the sizes of the models, a line for each kernel. A process of its own, in which kernels are not interpreted. Needs
no GPU.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "0"

import torch

from memsvc.device.kernels import ahead, launch
from memsvc.device.kernels.delta_memory import move_states
from memsvc.device.kernels.delta_verify import TILE, DeltaSite, DeltaTile, delta_verify
from tests.support import delta_models
from tests.support.compiled_kernel import registers_and_stack
from tests.support.kernel_compiler import compile_only


def main() -> None:
    """Compile with each tile that is named, else with the one that is used."""
    # As a step on a device launches them.
    launch.OVERLAP, ahead.operands = True, lambda weight: (weight, weight.nbytes)
    numbers = [int(word) for word in sys.argv[1:]]
    tiles = [DeltaTile(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)] or [TILE]
    rows = delta_models.steady_rows(2, "cpu")
    for name, spec in delta_models.MODELS.items():
        memory = delta_models.memory_of(spec, 2, 2, "cpu")
        raw, gates = delta_models.inputs_of(spec, rows.num_rows, "cpu")
        conv = torch.empty(spec.conv_kernel, spec.conv_dim)
        for tile in tiles:
            site = DeltaSite(memory=memory, layer=1, conv=conv, tile=tile)
            with compile_only() as kernels:
                delta_verify(raw, gates, rows, site, ahead=raw)
                move_states(rows, memory)
            for kernel in kernels:
                registers, spilled = registers_and_stack(kernel.cubin)
                found = {
                    "model": name, "kernel": kernel.name, "tile": tile, "registers": registers, "spilled": spilled,
                    "shared": kernel.shared_bytes, "read_bytes": kernel.widest("ld"),
                    "write_bytes": kernel.widest("st"),
                }  # fmt: skip
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
