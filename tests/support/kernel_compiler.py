"""Compiles Triton kernels for a GPU that this machine need not have, by calling them on CPU tensors.

Inside `compile_only` a launch compiles its kernel for the target, down to the GPU's own code, and runs nothing. So
one sees without a GPU whether a kernel compiles, and what it is made of: wide accesses, registers, shared memory.
It needs a process in which kernels are not interpreted. Compiling takes seconds of a core a kernel.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """One kernel that was launched."""

    name: str
    grid: Any
    ptx: str
    cubin: bytes = field(repr=False)
    shared_bytes: int
    num_warps: int

    def widest(self, verb: str) -> int:
        """Bytes a thread of the widest global ld or st."""
        found = [0]
        for line in self.ptx.splitlines():
            if f"{verb}.global" in line:
                op = line.split(f"{verb}.global")[1].split()[0]
                count = next((int(n) for n in ("8", "4", "2") if f".v{n}." in op), 1)
                found.append(count * int(op.rsplit(".", 1)[1][1:]) // 8)
        return max(found)


class _NoDevice:
    """What the compiler asks of a driver."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> str:
        return "cpu"


@contextmanager
def compile_only(target: GPUTarget = HOPPER) -> Iterator[list[Compiled]]:
    """The kernels that are launched inside, in order. Their outputs are never written."""
    assert isinstance(triton.jit(_nothing), JITFunction), "kernels of this process are interpreted"
    found: list[Compiled] = []
    run = JITFunction.run

    def compile_one(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        facts = SimpleNamespace(**kernel.metadata._asdict())
        made = {"ptx": kernel.asm["ptx"], "cubin": kernel.asm["cubin"], "shared_bytes": facts.shared}
        found.append(Compiled(name=facts.name, grid=grid, num_warps=facts.num_warps, **made))
        return kernel

    before = driver._active
    driver.set_active(_NoDevice(target))
    JITFunction.run = compile_one
    try:
        yield found
    finally:
        JITFunction.run = run
        driver._active = before


def _nothing() -> None:
    pass
