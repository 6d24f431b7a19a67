"""Prompts to tokens, and every limit that a request meets before it costs anything."""

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from memsvc.wire.text import Admit, ChatPrompt, Sampling, Submit, TextPrompt
from tokenizer_proc.config import TokenizerConfig
from tokenizer_proc.decode import TextDecoder, TextStream
from tokenizer_proc.pieces import TokenPieces, decode_rules
from tokenizer_proc.template import ChatTemplate, load_chat_template

_SHRINK = 4
"""Normalizers may shorten a text, Unicode composition to a third at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A prompt ready to be encoded."""

    text: str
    adds_special: bool
    """Whether the tokenizer's post-processor puts its special tokens around."""


class PromptEncoder:
    """The model's tokenizer and chat template, with the limits of the server. encode() may run in any thread."""

    def __init__(self, config: TokenizerConfig) -> None:
        """Reads the model folder. Raises ValueError on one without a tokenizer this process can use."""
        folder = Path(config.model_path)
        self.context_len = config.context_len
        self._config = config
        self._tokenizer, rules = _load_tokenizer(folder / "tokenizer.json")
        self.pieces = TokenPieces(self._tokenizer, rules)
        self.template: ChatTemplate | None = load_chat_template(folder)
        self._tokenizer_size = self._tokenizer.get_vocab_size()
        self.vocab_size = _model_vocab_size(folder) or self._tokenizer_size
        self._max_token_bytes = max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=1)

    def lines(self) -> list[str]:
        """What an operator should know about it."""
        template = "yes" if self.template else "no"
        return [f"tokenizer vocab={self.vocab_size} context={self.context_len} chat_template={template}"]

    def text_of(self, prompt: ChatPrompt | TextPrompt) -> Text:
        """The text to encode. Raises ValueError if there is none, or if its length alone rules it out."""
        match prompt:
            case TextPrompt(text):
                found = Text(text=text, adds_special=True)
            case ChatPrompt(messages, add_generation_prompt):
                if not messages:
                    raise ValueError("the conversation has 0 messages, at least 1 is needed")
                if self.template is None:
                    raise ValueError(
                        "the model has no chat template (neither chat_template.jinja nor chat_template in "
                        "tokenizer_config.json): send a plain prompt instead of messages"
                    )
                rendered = self.template.render(messages, add_generation_prompt=add_generation_prompt)
                # The template has written the special tokens already.
                found = Text(text=rendered, adds_special=False)
        self._check_text(found.text)
        return found

    def encode(self, text: Text) -> "array[int]":
        """Token ids of a prompt. Raises ValueError if it is too long. Other threads run meanwhile."""
        # encode_batch_fast lets go of the interpreter lock, encode does not.
        encoding = self._tokenizer.encode_batch_fast([text.text], add_special_tokens=text.adds_special)[0]
        self._check_prompt_len(len(encoding))
        token_ids = array("i", encoding.ids)
        if self._tokenizer_size > self.vocab_size:
            self._check_ids(token_ids, "the prompt")
        return token_ids

    def check_tokens(self, packed: bytes) -> "array[int]":
        """Token ids of a prompt that came as tokens. Raises ValueError on ids outside the vocabulary."""
        token_ids = _unpack(packed, "the prompt")
        self._check_prompt_len(len(token_ids))
        self._check_ids(token_ids, "the prompt")
        return token_ids

    def check_request(self, submit: Submit) -> None:
        """What can be said before the prompt is encoded. Raises ValueError with the numbers."""
        config = self._config
        if len(submit.stop) > config.max_stops:
            raise ValueError(f"{len(submit.stop)} stop strings, at most {config.max_stops} are allowed")
        if not all(submit.stop):
            raise ValueError("a stop string is empty: it would match everywhere")
        if (num_chars := sum(map(len, submit.stop))) > config.max_stop_chars:
            raise ValueError(f"the stop strings have {num_chars} characters, at most {config.max_stop_chars} together")
        if submit.sampling.max_tokens < 0:
            raise ValueError(f"max_tokens is {submit.sampling.max_tokens}, it must be 0 or more")
        self._check_ids(submit.sampling.stop_token_ids, "stop_token_ids")

    def admit(self, submit: Submit, prompt_ids: "array[int]") -> Admit:
        """The request as the target gets it. Raises ValueError if prompt and answer don't fit the context."""
        prompt_len = len(prompt_ids)
        if prompt_len == 0:
            raise ValueError("the prompt is empty: 0 tokens, at least 1 is needed")
        self._check_prompt_len(prompt_len)
        max_tokens = submit.sampling.max_tokens or self.context_len - prompt_len
        if prompt_len + max_tokens > self.context_len:
            raise ValueError(
                f"prompt of {prompt_len} tokens plus max_tokens {max_tokens} is {prompt_len + max_tokens} tokens, "
                f"the context holds {self.context_len}"
            )
        resumed = _unpack(submit.resumed, "the resumed answer")
        self._check_ids(resumed, "the resumed answer")
        sampling: Sampling = msgspec.structs.replace(submit.sampling, max_tokens=max_tokens)
        token_ids = prompt_ids.tobytes() + submit.resumed
        return Admit(submit.rid, token_ids, prompt_len, sampling, submit.priority, submit.salt)

    def stream_for(self, submit: Submit, prompt_ids: "array[int]") -> TextStream:
        """The text of this request's answer, from its first token on.

        An answer in a conversation is a text of its own; any other one goes on where the prompt ends.
        """
        at_start = isinstance(submit.prompt, ChatPrompt) or not any(self.pieces[token_id] for token_id in prompt_ids)
        decoder = TextDecoder(self.pieces, at_start=at_start)
        return TextStream(decoder, submit.stop, includes_stop=submit.include_stop)

    def _check_text(self, text: str) -> None:
        num_bytes = len(text.encode())
        limit = self.context_len * self._max_token_bytes * _SHRINK
        if num_bytes > limit:
            raise ValueError(
                f"the prompt has {num_bytes} bytes, more than the context of {self.context_len} tokens can hold: "
                f"no token has more than {self._max_token_bytes} bytes"
            )

    def _check_prompt_len(self, prompt_len: int) -> None:
        if prompt_len >= self.context_len:
            raise ValueError(
                f"the prompt has {prompt_len} tokens, the context holds {self.context_len} with the answer, "
                f"which needs at least 1"
            )

    def _check_ids(self, token_ids: "Sequence[int] | array[int]", where: str) -> None:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size)
            raise ValueError(f"token id {wrong} in {where} is not in the vocabulary [0, {self.vocab_size})")


def _unpack(packed: bytes, where: str) -> "array[int]":
    if len(packed) % 4:
        raise ValueError(f"{where} has {len(packed)} bytes, packed token ids have 4 each")
    return array("i", packed)


def _load_tokenizer(path: Path) -> tuple[Tokenizer, Any]:
    if not path.exists():
        raise ValueError(
            f"{path.parent} has no {path.name}: a tokenizer in the form of the tokenizers library is needed"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ValueError(f"{path} is no tokenizer of the tokenizers library: {error}") from error
    # Settings of the training run that some files carry: they would cut or pad prompts without a word.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    file = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
    return tokenizer, decode_rules(file.decoder)


def _model_vocab_size(folder: Path) -> int:
    """Rows of the model's embedding by config.json, 0 if it does not say."""
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    text_config = config.get("text_config")
    return config.get("vocab_size") or (text_config or {}).get("vocab_size") or 0


class _TokenizerFile(msgspec.Struct):
    decoder: Any = None
