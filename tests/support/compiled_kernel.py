"""Compiles Triton kernels for Hopper on a machine without a GPU, and says what they need there.

In a process of its own: one in which kernels are interpreted can compile none.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 << 10
"""Shared memory that a program may have there."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a program of a compiled kernel takes."""

    registers: int
    """A thread."""
    spilled_bytes: int
    """Of stack a thread: registers that found no room."""
    shared_bytes: int


def compile_kernel(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], *, unaligned: tuple[str, ...] = (), **options: Any
) -> Usage:
    """Compile a triton.jit function; it fails as it would on the GPU.

    types: of parameters that are neither constants nor int32, such as "*bf16" or "fp32". Pointers and integers are
    taken as multiples of 16 but for those named unaligned, as Triton finds them in most calls.
    """
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(types.items())
        if name not in unaligned and (kind == "i32" or kind.startswith("*"))
    }
    source = ASTSource(
        kernel, types, constexprs={(names.index(k),): value for k, value in constants.items()}, attrs=aligned
    )
    compiled = triton.compile(source, target=HOPPER, options=options)
    return Usage(*registers_and_stack(compiled.asm["cubin"]), compiled.metadata.shared)


def registers_and_stack(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of stack a thread) of the one kernel in it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
        told = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, check=True, text=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found, told
    return int(found[1]), int(found[2])
