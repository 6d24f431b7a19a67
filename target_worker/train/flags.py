"""Flags made of a config class: one a field, its help the string under the field."""

import argparse
import ast
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Protocol, TypeVar, get_args, get_origin

SMOLLM2 = "smollm2"


class _Config(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


C = TypeVar("C", bound=_Config)


def add_config(parser: argparse.ArgumentParser, *classes: type[_Config]) -> None:
    """One flag for each field of the config classes; fields of one name share a flag."""
    done: set[str] = set()
    for cls in classes:
        group = parser.add_argument_group(cls.__name__)
        texts = _field_docs(cls)
        for field in fields(cls):
            if field.name in done:
                continue
            done.add(field.name)
            flag, text = f"--{field.name.replace('_', '-')}", texts[field.name].replace("%", "%%")
            default = field.default
            if default is False:
                group.add_argument(flag, action="store_true", help=text)
                continue
            shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
            group.add_argument(
                flag,
                type=_parser_of(field.type),
                default=default,
                metavar=field.name.upper(),
                help=f"{text} (default {shown})",
            )


def config_from(cls: type[C], args: argparse.Namespace) -> C:
    """The config that parsed flags ask for. Raises ValueError naming the flag."""
    return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None, *classes: type[Any]) -> tuple[Any, ...]:
    """The parsed flags, then one config per class. Exits with status 2 on a bad one."""
    add_config(parser, *classes)
    args = parser.parse_args(argv)
    try:
        return args, *(config_from(cls, args) for cls in classes)
    except ValueError as error:
        parser.error(str(error))


@contextmanager
def one_line_errors(*more: type[Exception]) -> Iterator[None]:
    """Around or on a main: a ValueError, an OSError and one of `more` end it with status 1 and a line on stderr."""
    try:
        yield
    except (ValueError, OSError, *more) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def existing(flag: str, path: Path) -> Path:
    """The path that the flag names. Raises ValueError if nothing is there."""
    if not path.exists():
        raise ValueError(f"{flag} {path} does not exist")
    return path


def target_folder(name: str) -> Path:
    """The folder that --target names. smollm2 is fetched once, by the command that serving uses.

    Raises ValueError if it is not there and cannot be had.
    """
    if name != SMOLLM2:
        if not (Path(name) / "config.json").is_file():
            raise ValueError(f"{name} holds no config.json: --target takes a Hugging Face folder or {SMOLLM2}")
        return Path(name)
    done = subprocess.run([sys.executable, "-m", "launch.smollm2"], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ValueError("SmolLM2 is not in the cache and cannot be fetched; give its folder with --target DIR")
    return Path(done.stdout.strip())


def _field_docs(cls: type[_Config]) -> dict[str, str]:
    """Field name to the string under it, in the class itself or in the nearest one that it is made of."""
    docs: dict[str, str] = {}
    for part in reversed([part for part in cls.__mro__ if is_dataclass(part)]):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        assert isinstance(node, ast.ClassDef)
        for field, after in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                docs[ast.unparse(field.target)] = str(after.value.value)
    return docs


def _parser_of(annotation: Any) -> Any:
    """What turns the flag's text into the field's type."""
    if get_origin(annotation) is tuple:
        return _whole_numbers
    if isinstance(annotation, UnionType):
        (annotation,) = (part for part in get_args(annotation) if part is not type(None))
    return annotation


def _whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())
