"""Builds the allocator as a C extension where that is possible; everything else is in pyproject.toml.

memsvc.core is plain typed Python. mypyc compiles the same files, unchanged, which halves
the time of a Step (docs/decisions.md). Without mypyc or a C compiler the package is
installed as it is and only slower: memsvc.core.COMPILED says which of the two runs. With
MEMSVC_INTERPRETED=1 in the environment nothing is compiled.
"""

import os
import sys
from pathlib import Path
from typing import Any

from setuptools import setup

CORE = Path("memsvc/core")
INTERPRETED = {"__init__.py", "config.py"}
"""config.py holds what msgspec decodes into, which has to be an ordinary class."""


def extensions() -> list[Any]:
    """The compiled modules of memsvc.core; none where mypyc is missing or refuses."""
    if os.environ.get("MEMSVC_INTERPRETED", "") not in ("", "0"):
        return []
    sources = sorted(str(path) for path in CORE.glob("*.py") if path.name not in INTERPRETED)
    try:
        from mypyc.build import mypycify

        options = ["--ignore-missing-imports", "--follow-imports=silent"]
        built = mypycify([*options, *sources], opt_level="3", debug_level="0", group_name="memsvc.core")
    except (ImportError, SystemExit) as reason:
        print(f"memsvc.core stays interpreted: {reason!r}", file=sys.stderr)
        return []
    for extension in built:
        extension.optional = True
    return built


setup(ext_modules=extensions())
