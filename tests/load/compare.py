"""python -m tests.load.compare A B: how many answers of two runs (--save-texts) are equal."""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Comparison:
    """Answers of two runs side by side."""

    num_equal: int
    differing: list[str]
    """One line for each prompt whose answers differ."""
    num_unpaired: int
    """Answers that only one run completed."""


def _completed(path: Path) -> dict[tuple[int, str], tuple[str, str]]:
    """(index, prompt) -> (text, finish_reason) of the requests that were completed."""
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line]
    return {
        (r["index"], str(r["prompt"])): (r["text"], r["finish_reason"]) for r in records if r["outcome"] == "completed"
    }


def _first_difference(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def compare(a: Path, b: Path) -> Comparison:
    """Pair requests by index and prompt; equal means same text and same finish_reason."""
    left, right = _completed(a), _completed(b)
    both = sorted(left.keys() & right.keys())
    differing = []
    for index, prompt in both:
        (text_a, reason_a), (text_b, reason_b) = left[index, prompt], right[index, prompt]
        if text_a != text_b:
            at = _first_difference(text_a, text_b)
            differing.append(f"request {index} at character {at}: {text_a[at : at + 30]!r} | {text_b[at : at + 30]!r}")
        elif reason_a != reason_b:
            differing.append(f"request {index}: finish_reason {reason_a} | {reason_b}")
    return Comparison(len(both) - len(differing), differing, len(left.keys() ^ right.keys()))


def main(argv: list[str] | None = None) -> int:
    """Print the comparison; 0 if every answer has an equal one in the other run, 2 if a file can't be read."""
    parser = argparse.ArgumentParser(prog="python -m tests.load.compare", description=__doc__)
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    args = parser.parse_args(argv)
    try:
        found = compare(args.a, args.b)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in found.differing:
        print(line)
    num_paired = found.num_equal + len(found.differing)
    print(f"equal {found.num_equal} of {num_paired}, in one run only {found.num_unpaired}")
    return 0 if num_paired and not found.differing and not found.num_unpaired else 1


if __name__ == "__main__":
    sys.exit(main())
