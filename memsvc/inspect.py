"""`python -m memsvc stats|check|snapshot`: the admin side of a running service, for people and for scripts."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from memsvc.client import AdminClient
from memsvc.config import COMMANDS as ALL_COMMANDS
from memsvc.errors import MemoryServiceError
from memsvc.wire.admin import CheckReport, SnapshotReport, Stats
from memsvc.wire.links import MEM_ADMIN

COMMANDS = tuple(command for command in ALL_COMMANDS if command != "serve")


def inspect(argv: Sequence[str]) -> int:
    """Run one command and print its answer.

    0 = fine, 1 = check found something, 2 = no service runs there, or it does not answer.
    """
    parser = argparse.ArgumentParser(prog="python -m memsvc", description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--run-dir", required=True, type=Path, metavar="DIR", help="directory of the service's sockets")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds to wait (default 30)")
    arguments = parser.parse_args(argv)
    missing = _missing(arguments.run_dir)
    if missing:
        print(f"python -m memsvc {arguments.command}: {missing}", file=sys.stderr)
        return 2
    try:
        with AdminClient(arguments.run_dir, timeout_s=arguments.timeout) as admin:
            ask = {"stats": admin.get_stats, "check": admin.check, "snapshot": admin.snapshot}
            answer = ask[arguments.command]()
    except (MemoryServiceError, ValueError) as error:
        print(f"python -m memsvc {arguments.command}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(as_dict(answer), indent=1) if arguments.json else as_text(answer))
    return 1 if isinstance(answer, CheckReport) and answer.problems else 0


def _missing(run_dir: Path) -> str:
    """What is not there, as a sentence: a ZMQ socket would wait for it in silence. Empty if all is there."""
    if not run_dir.is_dir():
        return f"run directory {run_dir} does not exist"
    socket = Path(MEM_ADMIN.endpoint(run_dir).removeprefix("ipc://"))
    return "" if socket.exists() else f"no memory service runs in {run_dir}: {socket.name} is missing"


def as_dict(value: Any) -> Any:
    """A message with the names that do not travel, down to plain values."""
    if isinstance(value, msgspec.Struct):
        return {name: as_dict(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list):
        return [as_dict(item) for item in value]
    return value


def as_text(answer: Stats | CheckReport | SnapshotReport) -> str:
    """Tables for a terminal: columns of records, then single values."""
    blocks = []
    singles = []
    for name, value in as_dict(answer).items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            blocks.append(f"{name}\n{_table(value)}")
        else:
            singles.append({"": name, "value": value})
    return "\n\n".join([*blocks, _table(singles)])


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    numeric = [not isinstance(value, str) for value in rows[0].values()]
    return "\n".join(
        "  "
        + "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list):
        return ",".join(map(str, value)) or "-"
    if isinstance(value, dict):
        return " ".join(f"{name}={number}" for name, number in value.items()) or "-"
    return str(value)
