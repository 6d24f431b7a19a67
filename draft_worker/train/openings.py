"""Openings of a language model's own texts, for the model to go on: prompts without a template."""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from draft_worker.train.config import PromptConfig
from draft_worker.train.sequences import Sequences, from_lists
from target_worker.model.config import TargetShape
from target_worker.train.shards import HELD_OUT, TRAIN, read_documents

KIND = 5
"""The number of this kind of source, after that of train.questions."""
_DRAWS = 20
"""Draws for each opening that is wanted, before the texts count as too few."""

Opening = tuple[int, ...]


def openings(target: Path, config: PromptConfig) -> Sequences:
    """num_openings of the texts that the target was trained on, each once.

    Raises ValueError if there are not so many.
    """
    assert config.openings is not None, "no folder of shards"
    shape = TargetShape.from_folder(target)
    documents = without_ends(read_documents(config.openings, TRAIN), shape.eos_ids)
    found = draw(documents, config.num_openings, config, lambda _opening: True)
    return from_lists(found, shape.vocab_size, [KIND] * len(found))


def write_held_out(target: Path, config: PromptConfig) -> None:
    """held_out_openings of texts that the target was not trained on, as JSON lines with a text under prompt.

    Only those are taken that the target's tokenizer makes the same tokens of again. Raises ValueError if there are not
    so many.
    """
    assert config.openings is not None, "no folder of shards"
    assert config.held_out_file is not None, "no file for held-out openings"
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))

    def text_of(opening: Sequence[int]) -> str:
        return tokenizer.decode(list(opening), skip_special_tokens=True)

    def comes_back(opening: Sequence[int]) -> bool:
        return tokenizer.encode(text_of(opening), add_special_tokens=False).ids == list(opening)

    eos_ids = TargetShape.from_folder(target).eos_ids
    documents = without_ends(read_documents(config.openings, HELD_OUT), eos_ids)
    found = draw(documents, config.held_out_openings, config, comes_back)
    lines = [json.dumps({"prompt": text_of(opening)}) + "\n" for opening in found]
    config.held_out_file.parent.mkdir(parents=True, exist_ok=True)
    config.held_out_file.write_text("".join(lines), "ascii")


def without_ends(documents: Sequence[np.ndarray], eos_ids: Sequence[int]) -> list[np.ndarray]:
    """Documents without the tokens that end them: nothing is left to go on with behind those."""
    parts = []
    for document in documents:
        inside = np.flatnonzero(~np.isin(document, eos_ids))
        parts.append(document[inside[0] : inside[-1] + 1] if len(inside) else document[:0])
    return parts


def draw(
    documents: Sequence[np.ndarray], num: int, config: PromptConfig, fits: Callable[[Opening], bool]
) -> list[Opening]:
    """num different openings that fit. Raises ValueError if so many are not found."""
    long_enough = [document for document in documents if len(document) >= config.least_opening]
    found: dict[Opening, None] = {}
    for opening in islice(_candidates(long_enough, config), _DRAWS * num):
        if len(found) == num:
            break
        if opening not in found and fits(opening):
            found[opening] = None
    if len(found) < num:
        raise ValueError(f"{len(documents)} texts of {config.openings} gave {len(found)} of {num} openings")
    return list(found)


def _candidates(documents: Sequence[np.ndarray], config: PromptConfig) -> Iterator[Opening]:
    """Openings without end, by turns from where a text begins, each text once, and from any place of any text."""
    if not documents:
        return
    rng = np.random.default_rng((config.seed, 4))
    ends = np.cumsum([len(document) for document in documents])
    starts = iter(rng.permutation(len(documents)).tolist())
    is_start = False
    while True:
        is_start = not is_start
        length = int(rng.integers(config.least_opening, config.most_opening + 1))
        at = int(rng.integers(ends[-1]))
        index = int(np.searchsorted(ends, at, side="right"))
        place = at - int(ends[index]) + len(documents[index])
        if is_start and (first := next(starts, None)) is not None:
            index, place = first, 0
        opening = documents[index][place : place + length]
        if len(opening) >= config.least_opening:
            yield tuple(opening.tolist())
