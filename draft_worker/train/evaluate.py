"""`python -m draft_worker.train.evaluate`: accept length of a drafter in a real server."""

import argparse
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from draft_worker.train.config import model_folder_help
from draft_worker.train.flags import SMOLLM2, parse
from draft_worker.train.repetition import repeated_share
from draft_worker.train.served import served

_FIELDS = ("prompt", "question", "text")
_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """What to ask, and how."""

    temperature: float = 0.0
    """0 is greedy; request i samples with seed + i."""
    max_tokens: int = 256
    """Longest answer."""
    limit: int = 0
    """Only the first so many prompts; 0 = all."""
    last: int = 0
    """Only the last so many prompts, before limit; 0 = all."""
    concurrency: int = 1
    """Requests in flight at a time."""
    rounds: int = 1
    """Times that all prompts are sent; from the second on prompts are found in the prefix cache."""
    seed: int = 0
    """Of sampling."""
    loop_words: int = 6
    """Words of a run whose repetition counts as a loop."""
    loop_share: float = 0.3
    """An answer with a larger share of repeated runs is left out of the figures; 1 keeps all."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "concurrency", "rounds", "loop_words"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}, the least is 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What one request came to."""

    text: str
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    histogram: list[int]
    """Entry j: verify steps that accepted j drafts; may end before the longest that is possible."""
    num_drafts: int
    """Drafts of a block."""


def read_prompts(file: Path) -> list[str]:
    """One prompt a line. Lines that are JSON objects hold it under prompt, question or text, or as first of turns.

    Raises ValueError naming the line that holds none.
    """
    found = []
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        if line.lstrip().startswith("{"):
            found.append(_prompt_of(json.loads(line), f"{file} line {number}"))
        elif line.strip():
            found.append(line)
    if not found:
        raise ValueError(f"{file} holds no prompt")
    return found


def _prompt_of(record: dict[str, Any], where: str) -> str:
    values = [record.get(name) for name in _FIELDS] + list(record.get("turns") or [])[:1]
    text = next((value for value in values if isinstance(value, str)), None)
    if text is None:
        raise ValueError(f"{where} has no text under {', '.join(_FIELDS)} or turns")
    return text


def ask(url: str, prompt: str, seed: int, config: EvaluateConfig) -> Answer:
    """One chat request. Raises RuntimeError with the server's reason if it is refused."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": config.max_tokens,
        "temperature": config.temperature,
        "seed": seed,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            found = json.load(reply)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"HTTP {error.code}: {error.read()[:300].decode('utf-8', 'replace')}") from error
    usage = found["usage"]
    speculation = (found.get("metrics") or {}).get("speculative_decoding") or {}
    return Answer(
        text=found["choices"][0]["message"]["content"],
        output_tokens=usage["completion_tokens"],
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        histogram=speculation.get("acceptance_histogram", []),
        num_drafts=speculation.get("num_spec_tokens", 0),
    )


def ask_all(url: str, prompts: Sequence[str], config: EvaluateConfig) -> dict[str, Any]:
    """All prompts once, at the concurrency asked for; the figures."""
    started = perf_counter()

    def one(index: int) -> Answer:
        return ask(url, prompts[index], config.seed + index, config)

    with ThreadPoolExecutor(config.concurrency) as pool:
        answers = list(pool.map(one, range(len(prompts))))
    return figures(answers, config) | {"seconds": round(perf_counter() - started, 2)}


def figures(answers: Sequence[Answer], config: EvaluateConfig) -> dict[str, Any]:
    """Acceptance over all verify steps of the answers that do not go round in circles.

    accept_length counts the target's own token of each step; accept_per_position[j] is the share of
    steps that accepted more than j drafts.
    """
    kept = [answer for answer in answers if not is_loop(answer.text, config)]
    width = max((max(len(answer.histogram), answer.num_drafts + 1) for answer in kept), default=1)
    histogram = np.zeros(width)
    for answer in kept:
        histogram[: len(answer.histogram)] += answer.histogram
    num_steps = int(histogram.sum())
    reached = (histogram.sum() - histogram.cumsum())[: width - 1] / max(1, num_steps)
    return {
        "accept_length": round(1 + float(reached.sum()), 4),
        "accept_per_position": [round(float(share), 4) for share in reached],
        "n_steps": num_steps,
        "num_answers": len(answers),
        "num_loops": len(answers) - len(kept),
        "output_tokens": sum(answer.output_tokens for answer in answers),
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "cached_tokens": sum(answer.cached_tokens for answer in answers),
    }


def is_loop(text: str, config: EvaluateConfig) -> bool:
    """Too many of its runs of words stood before."""
    numbers: dict[str, int] = {}
    words = [numbers.setdefault(word, len(numbers)) for word in text.split()]
    return repeated_share(np.array(words, dtype=np.int64), config.loop_words) > config.loop_share


def evaluate(url: str, prompts: Sequence[str], config: EvaluateConfig) -> dict[str, Any]:
    """Figures of the first round at the top, of all rounds under rounds."""
    rounds = [ask_all(url, prompts, config) for _ in range(config.rounds)]
    return rounds[0] | {"rounds": rounds, "config": asdict(config)}


def main(argv: Sequence[str] | None = None) -> None:
    """Start a server, or use a running one, and print the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m draft_worker.train.evaluate", description=__doc__,
        epilog="Words after -- go to the server: -- --threads 1 --dtype bfloat16",
    )  # fmt: skip
    parser.add_argument("--target", default=SMOLLM2, help=model_folder_help())
    parser.add_argument("--draft", type=Path, default=None, help="folder of the drafter")
    parser.add_argument("--prompts", required=True, type=Path, help="prompts, one a line or JSON lines")
    parser.add_argument("--url", default="", help="ask this server instead of starting one")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a line")
    parser.add_argument("server_flags", nargs="*", help=argparse.SUPPRESS)
    args, config = parse(parser, argv, EvaluateConfig)
    if not args.url and args.draft is None:
        parser.error("--draft DIR is needed, or --url of a running server")
    prompts = read_prompts(args.prompts)
    prompts = prompts[-config.last :] if config.last else prompts
    prompts = prompts[: config.limit] if config.limit else prompts
    flags = [] if args.target == SMOLLM2 else ["--model-path", args.target]
    flags += ["--speculative-draft-model-path", str(args.draft), *args.server_flags]
    with nullcontext(args.url) if args.url else served(flags) as url:
        found = evaluate(url, prompts, config)
    if args.json:
        print(json.dumps(found))
    else:
        print(" ".join(f"{name}={value}" for name, value in found.items() if not isinstance(value, dict | list)))


if __name__ == "__main__":
    main()
