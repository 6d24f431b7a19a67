"""Chat templates of Hugging Face folders, rendered in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from memsvc.wire.text import ChatMessage

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """One model's template with its special tokens."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ValueError if source is no valid template."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template has an error in line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool) -> str:
        """The conversation as the model was trained to read it. Raises ValueError if the template refuses it."""
        try:
            return self._template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except Exception as error:
            # The template is the model's code: it may raise anything, and only this request suffers.
            raise ValueError(f"the chat template refused the messages: {error}") from error


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The folder's template: chat_template.jinja, else the entry in tokenizer_config.json, else None.

    Raises ValueError if it is no valid template.
    """
    config = _read_json(folder / "tokenizer_config.json")
    path = folder / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.exists() else _configured(config.get("chat_template"))
    return None if source is None else ChatTemplate(source, _special_tokens(folder, config))


def _configured(entry: Any) -> str | None:
    """A template as it is, or the one named default of a list of named ones."""
    if isinstance(entry, list):
        named = {item["name"]: item["template"] for item in entry}
        return named.get("default")
    return entry


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Variables such as bos_token; tokens are spelled as strings or as objects with a content."""
    found: dict[str, str] = {}
    for source in (_read_json(folder / "special_tokens_map.json"), config):
        for role in _ROLES:
            value = source.get(role)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                found[role] = value
    return found


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _environment() -> ImmutableSandboxedEnvironment:
    """Names and filters that templates of the hub rely on."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON: jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationTag(Extension):
    """{% generation %} marks the parts to train on; when serving it is its content and nothing else."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The nodes between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
