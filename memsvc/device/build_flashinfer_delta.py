"""`python -m memsvc.device.build_flashinfer_delta OUT` makes the library of memsvc.device.flashinfer_delta without a GPU.

FlashInfer has these kernels in CuTe DSL, which compiles them at their first call. Here the DSL is given tensors that
have a form and no memory, and what it makes for Hopper is linked into OUT/NAME/NAME.so, which apache-tvm-ffi alone
loads. OUT is flashinfer/data/aot of whoever loads it, or is copied there. Needs g++, the CUDA runtime in CUDA_HOME, and
a Python of its own with torch (a CPU build will do), flashinfer-python==0.6.18 or .post1 (--no-deps; the same sources),
nvidia-cutlass-dsl[cu13]==4.6.3, apache-tvm-ffi, numpy, cuda-python, nvidia-ml-py, einops, click, tabulate, requests,
tqdm, packaging and ninja.
"""

# pyright: reportMissingImports=false

import argparse
import inspect
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

parser = argparse.ArgumentParser(
    prog="python -m memsvc.device.build_flashinfer_delta", description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
)  # fmt: skip
parser.add_argument("out", type=Path, metavar="OUT", help="folder, made if it is not there")

try:
    import cutlass
    import cutlass.cute as cute
    import torch
    import tvm_ffi
    from cutlass.base_dsl.runtime import cuda
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
except ImportError as missing:
    if __name__ != "__main__":
        raise
    # Whoever asks for --help has none of it yet.
    parser.parse_args()
    parser.error(f"{missing}; --help says what is needed")

VERSIONS = {"flashinfer-python": "0.6.18", "nvidia-cutlass-dsl": "4.6.3"}
"""Whose kernels and compiler fit the operands that are given here."""
NAME = "gated_delta_prefill_sm90"
"""LIBRARY of memsvc.device.flashinfer_delta."""
BF16, F32, I64 = cutlass.BFloat16, cutlass.Float32, cutlass.Int64
HOPPER_SHARED_BYTES = 228 << 10
"""Of a multiprocessor: the only thing that the DSL asks a device for while it compiles."""

Kernel = tuple[Any, tuple[Any, ...]]
"""An object to compile, and its arguments."""


def flat(dtype: Any, align: int = 16) -> Any:
    """One dimension of any length."""
    return make_fake_tensor(dtype, (cute.sym_int(),), (1,), assumed_align=align)


def strided(dtype: Any, rank: int, leading: int, align: int = 16) -> Any:
    """Any extents, any strides but that of `leading`, which is 1."""
    strides = tuple(1 if i == leading else cute.sym_int64() for i in range(rank))
    return make_fake_tensor(dtype, tuple(cute.sym_int() for _ in range(rank)), strides, assumed_align=align)


def queries() -> Any:
    """[heads, dim, rows]"""
    return strided(BF16, 3, 1)


def columns() -> Any:
    """[dim, rows, heads]: keys, values and outputs."""
    return strided(BF16, 3, 0)


def inverses() -> Any:
    """[row, row, heads, blocks]"""
    return strided(BF16, 4, 1)


def squares() -> Any:
    """[dim, dim, heads, pieces]"""
    return strided(F32, 4, 1, 128)


def numbers(num: int) -> tuple[Any, ...]:
    """float32, so many times."""
    return tuple(flat(F32) for _ in range(num))


def maps() -> Any:
    """Room for TMA descriptors."""
    return flat(cutlass.Uint8, 128)


def ends() -> Any:
    """Where sequences begin, and the end."""
    return flat(I64, 8)


def sizes(num: int) -> tuple[Any, ...]:
    """So many counts."""
    return tuple(cutlass.Int32(0) for _ in range(num))


def kernels() -> dict[str, Kernel]:
    """By the names that they get in the library."""
    from flashinfer.gdn_kernels.delta_rule_dsl import delta_rule_cp_sm90 as parts
    from flashinfer.gdn_kernels.delta_rule_dsl import delta_rule_sm90 as whole

    stream, scale = make_fake_stream(use_tvm_ffi_env_stream=True), F32(0.0)
    fix_ups = {
        "few": parts.CPDeltaRuleFixupSimtSm90(True, 4),
        "some": parts.CPDeltaRuleFixupSimtSm90(True, 8),
        "many": parts.CPDeltaRuleFixupHmmaSm90(True),
    }
    return {
        "whole_bf16": (
            whole._FullyFusedDeltaRuleSm90(True, True, True, False, BF16),  # noqa: SLF001  it has no other name
            (
                queries(), columns(), columns(), columns(), *numbers(4), None, None, maps(), ends(), scale, *sizes(7),
                1, stream,
            ),
        ),
        "parts_t_bf16": (
            parts.CPDeltaRuleTPrecomputeSm90(BF16),
            (columns(), *numbers(1), flat(BF16, 128), ends(), *sizes(5), stream),
        ),
        "parts_mn_bf16": (
            parts.CPDeltaRuleMNPrecomputeSm90(BF16),
            (columns(), columns(), inverses(), *numbers(3), ends(), *sizes(7), stream),
        ),
        "parts_out_bf16": (
            parts.CPDeltaRulePrefillSm90(BF16, needs_initial_state=True, store_final_state=True),
            (
                queries(), columns(), columns(), inverses(), columns(), *numbers(4), maps(), ends(), scale, *sizes(8),
                stream,
            ),
        ),
    } | {
        f"parts_fix_{kind}": (rule, (squares(), squares(), *numbers(1), flat(F32, 128), ends(), *sizes(4), stream))
        for kind, rule in fix_ups.items()
    }  # fmt: skip


def hopper_attribute(attribute: Any, device_id: int = 0) -> int:
    """In the place of the DSL's question to a device."""
    assert attribute.name == "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR", attribute
    return HOPPER_SHARED_BYTES


def compile_all(folder: Path) -> list[Path]:
    """Object files of all kernels."""
    made = []
    for name, (rule, arguments) in kernels().items():
        started = time.perf_counter()
        done = cute.compile[cute.EnableTVMFFI(True), cute.GPUArch("sm_90a")](rule, *arguments)
        made.append(folder / f"{name}.o")
        done.export_to_c(str(made[-1]), function_name=name)
        seconds = time.perf_counter() - started
        print(f"{name}: {made[-1].stat().st_size / 1024:.0f} KiB in {seconds:.0f} s", flush=True)
    return made


def link(objects: list[Path], target: Path) -> None:
    """One library, of which only the kernels' functions are seen."""
    runtime = next(Path(inspect.getfile(cutlass)).parents[2].rglob("cu13/lib/libcuda_dialect_runtime_static.a"))
    cudart = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "lib64"
    ffi = Path(tvm_ffi.libinfo.find_libtvm_ffi()).parent
    exports = target.with_name("exports.map")
    exports.write_text("{ global: __tvm_ffi_*; local: *; };\n", encoding="utf-8")
    # Both libraries are found by their names: Python has loaded them, with torch and with tvm_ffi.
    subprocess.run(
        [
            "g++", "-shared", "-fPIC", "-s", "-o", target, *objects, runtime, f"-Wl,--version-script={exports}",
            f"-L{cudart}", "-lcudart", f"-L{ffi}", "-ltvm_ffi", "-Wl,--no-undefined", "-Wl,--as-needed",
        ],
        check=True,
    )  # fmt: skip
    exports.unlink()


def main() -> int:
    """The exit status."""
    target = parser.parse_args().out / NAME / f"{NAME}.so"
    for package, wanted in VERSIONS.items():
        if not (found := version(package)).startswith(wanted):
            parser.error(f"{package} {found} is installed, {wanted} is wanted")
    target.parent.mkdir(parents=True, exist_ok=True)
    # FlashInfer's decode kernels ask for a device when they are imported, and are left out if there is none.
    no_device = mock.patch.object(torch.cuda, "get_device_properties", side_effect=RuntimeError("no CUDA device"))
    with no_device, mock.patch.object(cuda, "get_device_attribute", hopper_attribute):
        objects = compile_all(target.parent)
    link(objects, target)
    for file in objects:
        file.unlink()
    print(f"{target}: {target.stat().st_size / 2**20:.2f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
