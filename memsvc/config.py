"""What the service is told at start: a JSON file, flags, or both (a flag wins over the file)."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec

from memsvc.core.config import EVICTION_POLICIES, PoolConfig
from memsvc.wire.mem import KindSpec

_SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_KIND_FORM = "NAME:BYTES:TOKENS[:WINDOW[:PAGES_PER_REQ[:state]]]"
_CLI_PAGE_SIZE = 16
COMMANDS = ("serve", "stats", "check", "snapshot")
"""First words of the command line; left out, it is serve."""
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
CPU = "cpu"
"""The device of an arena in CPU memory."""

USAGE = """\
python -m memsvc [serve] --run-dir DIR --arena-bytes BYTES --kind NAME:BYTES:TOKENS [option ...]
       python -m memsvc [serve] --config FILE [option ...]
       python -m memsvc stats|check|snapshot --run-dir DIR [--json] [--timeout S]"""

EPILOG = """\
looking into a running service:
  python -m memsvc stats --run-dir DIR      pages by kind and state, counters
  python -m memsvc check --run-dir DIR      verify that every byte is accounted for
  python -m memsvc snapshot --run-dir DIR   who holds what

example:
  python -m memsvc --run-dir DIR --arena-bytes 512M --kind target_kv:1M:16 --kind draft_kv:320K:16:2048
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemConfig:
    """Made once, by launch or from flags."""

    run_dir: str
    """Directory of the sockets, mode 0700; made if it is missing."""
    pool: PoolConfig
    """The arena and how it is shared."""
    supervised: bool = False
    """Started by a supervisor that binds all-launch in run_dir: end with it, announce Ready or Fatal to it."""
    log_level: str = "INFO"
    """Level of the process log."""
    device: str = CPU
    """Where the arena lies: cpu, cuda, cuda:N or GPU-UUID."""

    def __post_init__(self) -> None:
        if self.log_level not in LOG_LEVELS:
            raise ValueError(f"log_level is {self.log_level!r}, must be one of {LOG_LEVELS}")


def parse_config(argv: Sequence[str]) -> MemConfig:
    """The config that a command line without its first word asks for. Raises ValueError, or exits as argparse does."""
    if argv and not argv[0].startswith("-"):
        raise ValueError(f"no command {argv[0]!r}, there are {', '.join(COMMANDS)}")
    given = vars(make_parser().parse_args(argv))
    file = given.pop("config", None)
    base = read_config(file) if file else None
    own = {name: given.pop(name) for name in ("run_dir", "log_level", "supervised", "device") if name in given}
    for name in ("engine_quota_frames", "salt_quota_frames"):
        if name in given:
            given[name] = dict(given[name])
    if base is not None:
        return replace(base, pool=replace(base.pool, **given), **own)
    missing = [f"--{name.replace('_', '-')}" for name in ("run_dir", "arena_bytes") if name not in given | own]
    if "kinds" not in given:
        missing.append("--kind")
    if missing:
        raise ValueError(f"needed without --config: {', '.join(missing)}")
    settings: dict[str, Any] = {"page_size": _CLI_PAGE_SIZE} | given
    return MemConfig(pool=PoolConfig(**settings), **own)


def read_config(path: Path) -> MemConfig:
    """The config in a JSON file. Raises ValueError on anything that is not one, unknown keys included."""
    data = path.read_bytes()
    try:
        config = msgspec.json.decode(data, type=MemConfig)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    raw = msgspec.json.decode(data)
    for table, config_class in ((raw, MemConfig), (raw["pool"], PoolConfig)):
        unknown = table.keys() - {field.name for field in fields(config_class)}
        if unknown:
            raise ValueError(f"{path}: {config_class.__name__} has no {', '.join(sorted(unknown))}")
    return config


def make_parser() -> argparse.ArgumentParser:
    """All flags; those that are not given do not appear in the result."""
    parser = argparse.ArgumentParser(
        prog="python -m memsvc",
        usage=USAGE,
        description="Memory service for LLM serving: one pool for every byte that serving needs per token or request.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="JSON of memsvc.config.MemConfig")
    parser.add_argument("--run-dir", metavar="DIR", help="directory of the sockets, mode 0700; made if missing")
    parser.add_argument(
        "--device", metavar="DEVICE", help="where the arena lies: cpu, cuda, cuda:N or GPU-UUID (default cpu)"
    )
    parser.add_argument("--supervised", action="store_true", help="end with the parent, announce to it on all-launch")
    parser.add_argument("--log-level", choices=LOG_LEVELS, help="default INFO")
    _add_pool_flags(parser)
    return parser


def _add_pool_flags(parser: argparse.ArgumentParser) -> None:
    defaults = {field.name: field.default for field in fields(PoolConfig)} | {"page_size": _CLI_PAGE_SIZE}

    def add(flag: str, text: str, **options: Any) -> None:
        default = defaults.get(flag[2:].replace("-", "_"))
        shown = f" (default {default})" if isinstance(default, int | float | str) else ""
        parser.add_argument(flag, help=text + shown, **options)

    quota = {"action": "append", "type": parse_quota, "metavar": "NAME=FRAMES"}
    add("--arena-bytes", "the whole arena; 512M, 2G, ...", type=parse_bytes, metavar="BYTES")
    add("--page-size", "tokens in a page of a token kind", type=int, metavar="TOKENS")
    parser.add_argument(
        "--kind",
        action="append",
        dest="kinds",
        type=parse_kind,
        metavar=_KIND_FORM,
        help="one kind of page, repeatable; TOKENS is the page size, or 0 for pages held per request; "
        "state marks those of a recurrent state",
    )
    add("--exchange-bytes", "run of frames that belongs to no kind", type=parse_bytes, metavar="BYTES")
    add("--shared-bytes", "another one, for weights that two clients read", type=parse_bytes, metavar="BYTES")
    add("--eviction-policy", "which conversation's tail goes first", choices=EVICTION_POLICIES)
    add("--ttl-s", "policy ttl: cached text unused for so long is evicted", type=float, metavar="S")
    add(
        "--checkpoint-interval",
        "tokens between stored states of a prompt, 0 = by their size",
        type=int,
        metavar="TOKENS",
    )
    add("--lease-ms", "a remote client silent for so long is fenced", type=int, metavar="MS")
    add("--pin-budget-frames", "frames that pins may touch in all", type=int, metavar="FRAMES")
    add("--retract-ms", "an engine asked to give way has so long before it is fenced", type=int, metavar="MS")
    add("--slack-tokens", "slots past prompt + max_new that a request may reserve", type=int, metavar="TOKENS")
    add("--max-extend-tokens", "most slots in one reserve, 0 = no limit", type=int, metavar="TOKENS")
    add("--low-watermark", "share of the frames that opens leave free", type=float, metavar="SHARE")
    add("--high-watermark", "share that must be free before opens resume", type=float, metavar="SHARE")
    add("--engine-quota", "most frames of one engine, repeatable", dest="engine_quota_frames", **quota)
    add("--salt-quota", "most frames of one salt, repeatable", dest="salt_quota_frames", **quota)
    add("--idle-check-s", "silence after which the invariants are checked", type=float, metavar="S")


def parse_bytes(text: str) -> int:
    """A number of bytes: 4096, 64K, 512M, 1.5G, 2GiB (powers of 1024)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)(?:i?b)?", text.lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 4096, 64K, 512M, 2G")
    number = Fraction(match[1]) * _SUFFIXES[match[2]]
    if number.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of bytes")
    return int(number)


def parse_kind(text: str) -> KindSpec:
    """NAME:BYTES:TOKENS[:WINDOW[:PAGES_PER_REQ[:state]]]."""
    name, *parts = text.split(":")
    is_state = len(parts) == 5 and parts[-1] == "state"
    parts = parts[:-1] if is_state else parts
    try:
        page_bytes, (tokens, *rest) = parse_bytes(parts[0]), [int(part) for part in parts[1:]]
        window, pages_per_req = [*rest, 0, 0][:2]
        if not name or len(rest) > 2:
            raise ValueError
    except (ValueError, IndexError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"kind {text!r} is not of the form {_KIND_FORM}") from None
    return KindSpec(name, page_bytes, tokens, pages_per_req, window, is_state)


def parse_quota(text: str) -> tuple[str, int]:
    """NAME=FRAMES."""
    name, separator, frames = text.rpartition("=")
    if not separator or not frames.isdigit():
        raise argparse.ArgumentTypeError(f"quota {text!r} is not of the form NAME=FRAMES")
    return name, int(frames)
