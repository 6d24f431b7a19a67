"""What the clients ask: prompts from a file, or made up from a seed."""

import json
import random
from pathlib import Path
from typing import Any

from tests.load.options import LoadOptions

# Short common words: one token each in the vocabularies of today's models.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name team minute idea body back parent face level office door "
    "health person art war history party result change morning reason research girl guy moment air teacher force"
)
WORDS = tuple(_TEXT.split())


Prompt = str | list[int]
"""A text, or token ids."""


def _made_up(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


def _make_ids(options: LoadOptions) -> list[Prompt]:
    rng = random.Random(f"ids {options.seed}")
    prefix = random.Random(f"prefix {options.seed}").choices(range(options.token_ids), k=options.shared_prefix)
    return [prefix + rng.choices(range(options.token_ids), k=options.prompt_tokens) for _ in range(options.requests)]


def _prompt_of(record: Any, where: str) -> str:
    """The prompt in one JSON line: prompt, question, or the first of turns."""
    if isinstance(record, str):
        return record
    if isinstance(record, dict):
        for field in ("prompt", "question"):
            if isinstance(record.get(field), str):
                return record[field]
        turns = record.get("turns")
        if isinstance(turns, list) and turns and isinstance(turns[0], str):
            return turns[0]
    raise ValueError(f"{where} has no text under prompt, question or turns")


def read_prompts(path: Path) -> list[str]:
    """Prompts of a file, one per non-empty line; a .jsonl file has a JSON object or string on each.

    Raises ValueError with the line number if a JSON line holds no prompt or the file holds none at all.
    """
    lines = [(i, line) for i, line in enumerate(path.read_text("utf-8").splitlines(), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{path} holds no prompt")
    if path.suffix != ".jsonl":
        return [line for _, line in lines]
    prompts = []
    for number, line in lines:
        where = f"{path} line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON: {error}") from error
        prompts.append(_prompt_of(record, where))
    return prompts


def make_prompts(options: LoadOptions) -> list[Prompt]:
    """One prompt for each request. The same options give the same prompts; a short file is used again from its top."""
    if options.token_ids:
        return _make_ids(options)
    if options.prompts is not None:
        given = read_prompts(options.prompts)
        prompts = [given[i % len(given)] for i in range(options.requests)]
    else:
        rng = random.Random(f"prompts {options.seed}")
        prompts = [_made_up(rng, options.prompt_tokens) for _ in range(options.requests)]
    if options.shared_prefix:
        # Its own stream of random numbers, so that the prefix does not change with the number of requests.
        prefix = _made_up(random.Random(f"prefix {options.seed}"), options.shared_prefix)
        prompts = [f"{prefix} {prompt}" for prompt in prompts]
    return [*prompts]
