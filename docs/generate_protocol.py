"""Writes docs/protocol.md: prose from protocol_prose.md, tables from the messages themselves.

python -m docs.generate_protocol          write the file
python -m docs.generate_protocol --check  exit 1 if the file is not what would be written
"""

import argparse
import ast
import inspect
import itertools
import sys
import textwrap
import typing
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any

import msgspec

from memsvc.wire import admin, base, control, links, mem, spec, text

DOCS = Path(__file__).parent
PROSE = DOCS / "protocol_prose.md"
OUTPUT = DOCS / "protocol.md"

MODULES: list[ModuleType] = [base, mem, admin, spec, text, control]


def main() -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(description="generate docs/protocol.md")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    page = make_page()
    if not arguments.check:
        OUTPUT.write_text(page, encoding="ascii")
        return 0
    if OUTPUT.exists() and OUTPUT.read_text(encoding="ascii") == page:
        return 0
    print(f"{OUTPUT} is stale: run python -m docs.generate_protocol", file=sys.stderr)
    return 1


def make_page() -> str:
    """The whole page."""
    parts = [PROSE.read_text(encoding="ascii").rstrip(), "## Links", _links_table()]
    for module in MODULES:
        messages = _messages(module)
        if not messages:
            continue
        parts.append(f"## {module.__name__.rpartition('.')[2]}: {_doc(module)}")
        parts.extend(_message_section(message) for message in messages)
    return "\n\n".join(parts) + "\n"


def _links_table() -> str:
    rows = ["| link | binds | sockets (connects/binds) | to the binder | from the binder |", "|---|---|---|---|---|"]
    for link in links.LINKS:
        there, back = _union_names(link.there), _union_names(link.back)
        rows.append(f"| {link.name} | {link.binder} | {link.sockets} | {there} | {back} |")
    return "\n".join(rows)


def _union_names(union: Any) -> str:
    if union is None:
        return "-"
    members = typing.get_args(union) if isinstance(union, UnionType) else [union]
    return ", ".join(f"[{member.__name__}](#{member.__name__.lower()})" for member in members)


def _messages(module: ModuleType) -> list[type[msgspec.Struct]]:
    # A union of one message is that class under a second name.
    classes = dict.fromkeys(value for value in vars(module).values() if inspect.isclass(value))
    return [
        value
        for value in classes
        if issubclass(value, base.Msg) and value is not base.Msg and value.__module__ == module.__name__
    ]


def _message_section(message: type[msgspec.Struct]) -> str:
    section = f"### {message.__name__}\n\n{_doc(message)}"
    fields = msgspec.structs.fields(message)
    if not fields:
        return section
    notes = _field_notes(message)
    rows = ["| # | field | type | default | |", "|---|---|---|---|---|"]
    for i, field in enumerate(fields, start=1):
        default = _default(field)
        rows.append(f"| {i} | {field.name} | {_type_name(field.type)} | {default} | {notes.get(field.name, '')} |")
    return section + "\n\n" + "\n".join(rows)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT:
        return f"`{field.default!r}`"
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{field.default_factory()!r}`"
    return ""


def _type_name(annotation: Any) -> str:
    if isinstance(annotation, UnionType):
        return " or ".join(_type_name(member) for member in typing.get_args(annotation))
    arguments = typing.get_args(annotation)
    if arguments:
        return f"{typing.get_origin(annotation).__name__}[{', '.join(map(_type_name, arguments))}]"
    return "None" if annotation is type(None) else annotation.__name__


def _field_notes(message: type[msgspec.Struct]) -> dict[str, str]:
    """The string that follows a field in the class body, by field name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(message)))
    body = typing.cast("ast.ClassDef", tree.body[0]).body
    notes = {}
    for statement, following in itertools.pairwise(body):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(note))):
                notes[name] = _flat(note)
            case _:
                pass
    return notes


def _doc(thing: object) -> str:
    paragraphs = (inspect.getdoc(thing) or "").split("\n\n")
    return "\n\n".join(_flat(paragraph) for paragraph in paragraphs)


def _flat(text_block: str) -> str:
    return " ".join(text_block.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
