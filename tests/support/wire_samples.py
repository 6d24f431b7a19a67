"""One instance of every message, made from its field types: the same on every run.

python -m tests.support.wire_samples --regenerate    rewrite the golden file after a protocol change
"""

import enum
import inspect
import json
import sys
import typing
from itertools import count
from pathlib import Path
from types import UnionType
from typing import Any

import msgspec

from memsvc.wire import admin, base, control, mem, spec, text
from memsvc.wire.codec import encode

GOLDEN = Path(__file__).parents[1] / "unit" / "memsvc" / "wire_golden.json"


def message_classes() -> list[type[base.Msg]]:
    """Every concrete message, by module and name."""
    modules = (base, mem, admin, spec, text, control)
    found = {
        value
        for module in modules
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, base.Msg) and value is not base.Msg
    }
    return sorted(found, key=lambda message: (message.__module__, message.__name__))


def make_sample(message: type[base.Msg]) -> base.Msg:
    """An instance with every field set to something other than its default."""
    return _Maker().make(message)


class _Maker:
    def __init__(self) -> None:
        self._numbers = count(1)

    def make(self, annotation: Any) -> Any:
        if hasattr(annotation, "__supertype__"):
            return self.make(annotation.__supertype__)
        arguments = typing.get_args(annotation)
        if isinstance(annotation, UnionType):
            return self.make(arguments[0])
        match typing.get_origin(annotation) or annotation:
            case list_type if list_type is list:
                # Two of a union's members, so that both tags are seen.
                members = typing.get_args(arguments[0]) if isinstance(arguments[0], UnionType) else arguments * 2
                return [self.make(member) for member in members]
            case dict_type if dict_type is dict:
                return {self.make(arguments[0]): self.make(arguments[1])}
            case kind if issubclass(kind, base.Msg):
                return kind(*[self.make(field.type) for field in msgspec.structs.fields(kind)])
            case kind if issubclass(kind, enum.Enum):
                return list(kind)[-1]
            case kind:
                return self._plain(kind)

    def _plain(self, kind: type) -> Any:
        number = next(self._numbers)
        values = {int: number, float: number + 0.5, bool: True, str: f"text{number}", bytes: b"\x01\x02\x03" + b"\0"}
        return values[kind]


def golden_text() -> str:
    """The golden file as it should be: message name to the hex of its frame."""
    frames = {message.__name__: encode(make_sample(message)).hex() for message in message_classes()}
    return json.dumps(frames, indent=1) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] != ["--regenerate"]:
        sys.exit(__doc__)
    GOLDEN.write_text(golden_text(), encoding="ascii")
