"""Builds what is compiled, where that is possible; everything else is in pyproject.toml.

memsvc.core is plain typed Python. mypyc compiles the same files, unchanged, which halves
the time of a Step (docs/decisions.md). memsvc.device.cpu holds kernels in C++ for bfloat16 on CPUs with AVX-512.
Without mypyc or a C compiler the package is installed as it is and only slower: memsvc.core.COMPILED says
which core runs, and the log of a worker which kernels. With MEMSVC_INTERPRETED=1 in the environment nothing is
compiled; MEMSVC_COMPILE names one of the two, core or kernels.
"""

import os
import platform
import runpy
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup

CORE = Path("memsvc/core")
INTERPRETED = {"__init__.py", "config.py"}
"""config.py holds what msgspec decodes into, which has to be an ordinary class."""
KERNELS = Path("memsvc/device/cpu")
# Contraction would change last bits; gcc's own headers draw the warnings.
KERNEL_FLAGS = "-O3 -std=c++17 -ffp-contract=off -fno-math-errno -Wno-uninitialized -Wno-maybe-uninitialized"
INSTRUCTIONS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16", "amx-tile", "amx-bf16")
"""Compiled for; which of them the CPU has is asked at start."""


def core() -> list[Any]:
    """The compiled modules of memsvc.core; none where mypyc is missing or refuses."""
    sources = sorted(str(path) for path in CORE.glob("*.py") if path.name not in INTERPRETED)
    try:
        from mypyc.build import mypycify

        options = ["--ignore-missing-imports", "--follow-imports=silent"]
        return mypycify([*options, *sources], opt_level="3", debug_level="0", group_name="memsvc.core")
    except (ImportError, SystemExit) as reason:
        print(f"memsvc.core stays interpreted: {reason!r}", file=sys.stderr)
        return []


def kernels() -> list[Any]:
    """The library of memsvc.device.cpu, which carries the digest of its source; none on other machines."""
    if platform.machine().lower() not in ("x86_64", "amd64") or os.name != "posix":
        return []
    digest = runpy.run_path(str(KERNELS / "digest.py"))["source_digest"](KERNELS)
    return [
        Extension(
            "memsvc.device.cpu._kernels",
            sources=sorted(str(path) for path in KERNELS.glob("*.cpp")),
            depends=sorted(str(path) for path in KERNELS.glob("*.h")),
            define_macros=[("SOURCE_DIGEST", f'"{digest}"')],
            extra_compile_args=[*KERNEL_FLAGS.split(), *(f"-m{name}" for name in INSTRUCTIONS)],
            language="c++",
        )
    ]


def extensions() -> list[Any]:
    """What is to be compiled. A failure leaves the Python code in its place."""
    if os.environ.get("MEMSVC_INTERPRETED", "") not in ("", "0"):
        return []
    wanted = os.environ.get("MEMSVC_COMPILE", "core kernels").split()
    built = [*(core() if "core" in wanted else []), *(kernels() if "kernels" in wanted else [])]
    for extension in built:
        extension.optional = True
    return built


setup(ext_modules=extensions())
