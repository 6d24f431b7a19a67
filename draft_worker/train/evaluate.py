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

from draft_worker.shape import DraftShape
from draft_worker.train.config import model_folder_help
from draft_worker.train.repetition import repeated_share
from draft_worker.train.served import served
from target_worker.train.flags import SMOLLM2, existing, one_line_errors, parse, target_folder

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
    raw: bool = False
    """Send prompts as they are for the model to go on, not as chat messages."""
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
    """One request. Raises RuntimeError with the server's reason if it is refused."""
    asked = {"prompt": prompt} if config.raw else {"messages": [{"role": "user", "content": prompt}]}
    body = asked | {"max_tokens": config.max_tokens, "temperature": config.temperature, "seed": seed}
    route = "completions" if config.raw else "chat/completions"
    request = urllib.request.Request(
        f"{url}/v1/{route}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            found = json.load(reply)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"HTTP {error.code}: {error.read()[:300].decode('utf-8', 'replace')}") from error
    usage, choice = found["usage"], found["choices"][0]
    speculation = (found.get("metrics") or {}).get("speculative_decoding") or {}
    return Answer(
        text=choice["text"] if config.raw else choice["message"]["content"],
        output_tokens=usage["completion_tokens"],
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        histogram=speculation.get("acceptance_histogram", []),
        num_drafts=speculation.get("num_spec_tokens", 0),
    )


def ask_all(url: str, prompts: Sequence[str], config: EvaluateConfig) -> tuple[list[Answer], float]:
    """All prompts once, at the concurrency asked for; the answers in their order, and seconds."""
    started = perf_counter()

    def one(index: int) -> Answer:
        return ask(url, prompts[index], config.seed + index, config)

    with ThreadPoolExecutor(config.concurrency) as pool:
        answers = list(pool.map(one, range(len(prompts))))
    return answers, perf_counter() - started


def figures(answers: Sequence[Answer], config: EvaluateConfig) -> dict[str, Any]:
    """Acceptance over all verify steps of the answers that do not go round in circles.

    accept_length counts the target's own token of each step; accept_length_error is its standard error over
    answers, accept_length_with_loops counts the others too. accept_per_position[j] is the share of steps that
    accepted more than j drafts.
    """
    kept = [answer for answer in answers if not is_loop(answer.text, config)]
    counts = histograms(kept)
    histogram = counts.sum(0)
    reached = (histogram.sum() - histogram.cumsum())[:-1] / max(1.0, histogram.sum())
    return {
        "accept_length": round(length(counts), 4),
        "accept_length_error": round(length_error(counts), 4),
        "accept_length_with_loops": round(length(histograms(answers)), 4),
        "accept_per_position": [round(float(share), 4) for share in reached],
        "n_steps": int(histogram.sum()),
        "num_answers": len(answers),
        "num_loops": len(answers) - len(kept),
        "output_tokens": sum(answer.output_tokens for answer in answers),
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "cached_tokens": sum(answer.cached_tokens for answer in answers),
    }


def histograms(answers: Sequence[Answer]) -> np.ndarray:
    """[answers, drafts + 1]: verify steps of each answer by how many drafts they accepted."""
    width = max((max(len(answer.histogram), answer.num_drafts + 1) for answer in answers), default=1)
    counts = np.zeros((len(answers), width))
    for row, answer in zip(counts, answers, strict=True):
        row[: len(answer.histogram)] = answer.histogram
    return counts


def length(counts: np.ndarray) -> float:
    """Tokens of a step, the target's own among them, by histograms [n, drafts + 1]; 1 without steps."""
    total = counts.sum(0)
    return 1 + float(total @ np.arange(len(total))) / max(1.0, float(total.sum()))


def length_error(counts: np.ndarray) -> float:
    """Standard error of `length` over rows of counts: of a ratio of two sums, to first order; 0 for less than two rows."""
    num, steps = len(counts), counts.sum(1)
    if num < 2 or not steps.any():
        return 0.0
    off = counts @ np.arange(counts.shape[1]) + steps - length(counts) * steps
    return float(np.sqrt((off**2).sum() * num / (num - 1)) / steps.sum())


def is_loop(text: str, config: EvaluateConfig) -> bool:
    """Too many of its runs of words stood before."""
    numbers: dict[str, int] = {}
    words = [numbers.setdefault(word, len(numbers)) for word in text.split()]
    return repeated_share(np.array(words, dtype=np.int64), config.loop_words) > config.loop_share


def evaluate(url: str, prompts: Sequence[str], config: EvaluateConfig, file: Path | None = None) -> dict[str, Any]:
    """Figures of the first round at the top, of all rounds under rounds; with a file, each answer as a line of JSON there.

    num_same of a round counts answers with the text of the first round.
    """
    first: list[Answer] = []
    rounds = []
    with nullcontext() if file is None else file.open("w", encoding="utf-8") as out:
        for number in range(config.rounds):
            answers, seconds = ask_all(url, prompts, config)
            first = first or answers
            num_same = sum(one.text == other.text for one, other in zip(first, answers, strict=True))
            rounds.append(figures(answers, config) | {"num_same": num_same, "seconds": round(seconds, 2)})
            if out is not None:
                out.writelines(json.dumps({"round": number} | asdict(answer)) + "\n" for answer in answers)
    return rounds[0] | {"rounds": rounds, "config": asdict(config)}


@one_line_errors(RuntimeError)
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
    parser.add_argument("--answers", type=Path, default=None, help="file for the answers, one a line as JSON")
    parser.add_argument("server_flags", nargs="*", help=argparse.SUPPRESS)
    args, config = parse(parser, argv, EvaluateConfig)
    if not args.url and args.draft is None:
        parser.error("--draft DIR is needed, or --url of a running server")
    if args.draft is not None:
        existing("--draft", args.draft)
    if not args.url and args.target != SMOLLM2:
        target_folder(args.target)
    prompts = read_prompts(existing("--prompts", args.prompts))
    prompts = prompts[-config.last :] if config.last else prompts
    prompts = prompts[: config.limit] if config.limit else prompts
    flags = [] if args.target == SMOLLM2 else ["--model-path", args.target]
    flags += ["--speculative-draft-model-path", str(args.draft), *with_width(args.draft, args.server_flags)]
    with nullcontext(args.url) if args.url else served(flags) as url:
        found = evaluate(url, prompts, config, args.answers)
    if args.json:
        print(json.dumps(found))
    else:
        print(" ".join(f"{name}={value}" for name, value in found.items() if not isinstance(value, dict | list)))


def with_width(draft: Path | None, server_flags: Sequence[str]) -> list[str]:
    """The server's flags, with blocks as long as the drafter was trained for unless they say how long."""
    names = ("--spec-tokens", "--spec-widths", "--speculative-num-draft-tokens", "--speculative-dflash-block-size")
    if draft is None or any(flag.partition("=")[0] in names for flag in server_flags):
        return list(server_flags)
    return ["--spec-tokens", str(DraftShape.from_folder(draft).block_size - 1), *server_flags]


if __name__ == "__main__":
    main()
