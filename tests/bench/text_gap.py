"""Where two greedy answers to one prompt part, and how far apart the target's logits of their tokens are there.

The API gives texts, so tokens are those that the tokenizer makes of a text. A model may have written the same text with
others; the number of tokens that the server counted tells (`is_sure`), and so does a token of the common part that is
not the target's choice (`Gap.off`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from draft_worker.train.target import FrozenTarget
from memsvc.wire.text import ChatMessage, ChatPrompt, TextPrompt
from target_worker.model.config import TargetShape
from target_worker.model.decoder import Decoder
from tokenizer_proc.config import TokenizerConfig
from tokenizer_proc.encode import PromptEncoder, Text


@dataclass(frozen=True, kw_only=True, slots=True)
class Parting:
    """Two answers up to the first token that differs."""

    prompt_ids: list[int]
    common: list[int]
    """Tokens of the answer that both have."""
    tokens: tuple[int, int]
    """The next one of each; that of an answer that ends is an end token."""
    texts: tuple[str, str]
    is_sure: bool
    """Both answers have as many tokens as the server counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """What the target's logits say where answers part."""

    gap: float
    """Logit of the first answer's token minus that of the second's."""
    behind: float
    """By how much the larger of both is below the largest of all: 0 where greedy decoding had to take one of them."""
    off: float
    """The most that a token of the common part is below the largest logit of its row."""
    spacing: float
    """Between two numbers of the dtype at that logit."""


class AnswerTokens:
    """Tokens of prompts and answers, as the server of a model's folder makes and reads them."""

    def __init__(self, folder: Path, *, raw: bool) -> None:
        self._shape = TargetShape.from_folder(folder)
        config = TokenizerConfig(run_dir="", model_path=str(folder), context_len=self._shape.max_positions)
        self._encoder = PromptEncoder(config)
        self._raw = raw

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer and stand in no text."""
        return self._shape.eos_ids

    def parting(self, prompt: str, answers: tuple[tuple[str, int], tuple[str, int]]) -> Parting | None:
        """Of two answers (text, number of tokens). None if neither's tokens tell: the texts differ in no whole token."""
        text = self._encoder.text_of(TextPrompt(prompt) if self._raw else ChatPrompt([ChatMessage("user", prompt)]))
        prompt_ids = list(self._encoder.encode(text))
        (a, is_sure_a), (b, is_sure_b) = (self._answer(text, prompt_ids, *answer) for answer in answers)
        index = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if index is None:
            return None
        return Parting(
            prompt_ids=prompt_ids,
            common=a[:index],
            tokens=(a[index], b[index]),
            texts=(self._piece(a[index]), self._piece(b[index])),
            is_sure=is_sure_a and is_sure_b,
        )

    def _answer(self, prompt: Text, prompt_ids: list[int], answer: str, num_tokens: int) -> tuple[list[int], bool]:
        """Tokens, with one at the end if the answer was not cut off, and whether they are as many as were counted."""
        alone = list(self._encoder.encode(Text(text=answer, adds_special=False))) if answer else []
        whole = list(self._encoder.encode(Text(text=prompt.text + answer, adds_special=prompt.adds_special)))
        # A tokenizer that puts something in front of every text makes other tokens of an answer alone.
        goes_on = whole[: len(prompt_ids)] == prompt_ids
        forms = [whole[len(prompt_ids) :], alone] if goes_on else [alone]
        for ids in forms:
            if len(ids) == num_tokens:
                return ids, True
            if len(ids) + 1 == num_tokens and self.end_ids:
                return [*ids, self.end_ids[0]], True
        return forms[0], False

    def _piece(self, token_id: int) -> str:
        return "<end>" if token_id in self.end_ids else self._encoder.pieces[token_id].decode("utf-8", "replace")


@torch.no_grad()
def gap_of(model: Decoder, parting: Parting, end_ids: Sequence[int]) -> Gap:
    """Of one forward over the prompt and what both answers have. Any of the end tokens may end an answer."""
    ids = torch.tensor([parting.prompt_ids + parting.common])
    _, hidden = FrozenTarget(model, ()).read(ids)
    # Row j of these says what stands at place j of the answer.
    logits = model.logits(hidden[len(parting.prompt_ids) - 1 :]).float()
    most, last = logits.max(1).values, logits[-1]
    taken = logits.gather(1, torch.tensor(parting.common, dtype=torch.int64)[:, None])[:, 0]
    a, b = (float(last[list(end_ids) if token in end_ids else token].max()) for token in parting.tokens)
    return Gap(
        gap=a - b,
        behind=float(most[-1]) - max(a, b),
        off=float((most[:-1] - taken).max()) if parting.common else 0.0,
        spacing=_spacing(max(a, b), model.dtype),
    )


def _spacing(value: float, dtype: torch.dtype) -> float:
    exponent = torch.frexp(torch.tensor(value)).exponent
    return float(torch.ldexp(torch.tensor(torch.finfo(dtype).eps), exponent - 1))
