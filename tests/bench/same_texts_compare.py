"""Two records of tests.bench.same_texts side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draft_worker.train.evaluate import Answer, histograms, length
from target_worker.model.weights import load_target
from tests.bench.served_models import find_model
from tests.bench.text_gap import AnswerTokens, Gap, Parting, gap_of

_SAME = ("max_tokens", "raw")
"""Settings without which answers cannot be compared."""

Pair = tuple[Mapping[str, Any], Mapping[str, Any]]
"""Answers of two records to one prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Two answers to one prompt that are not equal."""

    number: int
    """Of the prompt, from 0."""
    parting: Parting | None
    """None: no token of them tells."""
    gaps: Mapping[str, Gap]
    """By dtype."""

    @property
    def line(self) -> str:
        """For people."""
        where = f"prompt {self.number}"
        if self.parting is None:
            return f"{where}: the texts differ, in no whole token"
        (a, b), (text_a, text_b) = self.parting.tokens, self.parting.texts
        parts = [f"{where} at token {len(self.parting.common)}: {text_a!r} ({a}) | {text_b!r} ({b})"]
        parts += [
            f"{dtype} gap {gap.gap:+.4g} (behind {gap.behind:.3g}, before {gap.off:.3g}, spacing {gap.spacing:.3g})"
            for dtype, gap in self.gaps.items()
        ]
        return "; ".join(parts) + ("" if self.parting.is_sure else "; tokens are not as many as were counted")

    def as_json(self) -> dict[str, Any]:
        """Without the tokens that both have, which are an answer's text."""
        found = {"prompt": self.number, "gaps": {dtype: asdict(gap) for dtype, gap in self.gaps.items()}}
        if (parting := self.parting) is None:
            return found
        return found | {
            "token": len(parting.common), "tokens": parting.tokens, "texts": parting.texts, "is_sure": parting.is_sure
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """How many answers are equal, where the others part, and what drafts were accepted for."""

    num: int
    max_tokens: int
    differences: list[Difference]
    accept_lengths: tuple[float, float]
    """As evaluate has them: without answers in a loop."""
    accept_errors: tuple[float, float]
    """Standard errors of these over answers."""
    equal_accept_lengths: tuple[float, float]
    """Over the answers that are equal, in which nothing but the drafts can differ."""

    @property
    def num_equal(self) -> int:
        """Answers with the same text and the same number of tokens."""
        return self.num - len(self.differences)

    def passes(self, max_gap: float) -> bool:
        """All are equal, or part by no more than max_gap in the first dtype, between tokens as close to the likeliest."""
        gaps = [next(iter(difference.gaps.values()), None) for difference in self.differences]
        return all(gap is not None and max(abs(gap.gap), gap.behind, gap.off) <= max_gap for gap in gaps)

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "num": self.num, "num_equal": self.num_equal, "max_tokens": self.max_tokens,
            "accept_lengths": self.accept_lengths, "accept_errors": self.accept_errors,
            "accept_ratio": round(ratio(self.accept_lengths), 4),
            "equal_accept_lengths": self.equal_accept_lengths,
            "equal_accept_ratio": round(ratio(self.equal_accept_lengths), 4),
            "differences": [one.as_json() for one in self.differences],
        }  # fmt: skip


def ratio(lengths: tuple[float, float]) -> float:
    """Of the second accept length to the first; none is below 1."""
    return lengths[1] / lengths[0]


def compare(
    a: Mapping[str, Any], b: Mapping[str, Any], prompts: Mapping[str, str], target: str, dtypes: Sequence[str]
) -> Comparison:
    """prompts: by sha256. target: as find_model takes it, and only looked for if answers differ. Raises ValueError if the records are not of the same questions."""
    _check_same(a, b)
    pairs = list(zip(a["answers"], b["answers"], strict=True))
    other = [number for number, pair in enumerate(pairs) if _key(pair[0]) != _key(pair[1])]
    return Comparison(
        num=len(pairs),
        max_tokens=a["config"]["max_tokens"],
        differences=_differences({n: pairs[n] for n in other}, prompts, target, (a["config"]["raw"], dtypes)),
        accept_lengths=(a["accept_length"], b["accept_length"]),
        accept_errors=(a["accept_length_error"], b["accept_length_error"]),
        equal_accept_lengths=_accept_lengths([pair for n, pair in enumerate(pairs) if n not in other]),
    )


def _accept_lengths(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Of each record over these answers, 1 if there are none."""
    a, b = (
        length(histograms([Answer(**{k: v for k, v in pair[side].items() if k != "prompt_sha256"}) for pair in pairs]))
        for side in (0, 1)
    )
    return round(a, 4), round(b, 4)


def _key(answer: Mapping[str, Any]) -> tuple[str, int]:
    return answer["text"], answer["output_tokens"]


def _check_same(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    for name in _SAME:
        if a["config"][name] != b["config"][name]:
            raise ValueError(f"{name} is {a['config'][name]} in one record and {b['config'][name]} in the other")
    left, right = ([answer["prompt_sha256"] for answer in one["answers"]] for one in (a, b))
    if left != right:
        raise ValueError(f"the records are of other prompts, {len(left)} and {len(right)}")


def _differences(
    pairs: Mapping[int, Pair],
    prompts: Mapping[str, str],
    target: str,
    how: tuple[bool, Sequence[str]],
) -> list[Difference]:
    if not pairs:
        return []
    raw, dtypes = how
    folder = find_model(target).folder
    tokens = AnswerTokens(folder, raw=raw)
    partings = {}
    for number, (a, b) in pairs.items():
        if (prompt := prompts.get(a["prompt_sha256"])) is None:
            raise ValueError(f"prompt {number} is not known: name the file that was asked with --prompts")
        partings[number] = tokens.parting(prompt, (_key(a), _key(b)))
    gaps: dict[int, dict[str, Gap]] = {number: {} for number in pairs}
    for dtype in dtypes:
        model, _ = load_target(folder, dtype)
        for number, parting in partings.items():
            if parting is not None:
                gaps[number][dtype] = gap_of(model, parting, tokens.end_ids)
    return [Difference(number=n, parting=partings[n], gaps=gaps[n]) for n in pairs]


def report(found: Comparison) -> str:
    """The lines that are printed."""
    (a, b), (error_a, error_b) = found.accept_lengths, found.accept_errors
    equal_a, equal_b = found.equal_accept_lengths
    lines = [difference.line for difference in found.differences]
    lines += [
        f"equal {found.num_equal} of {found.num} answers of up to {found.max_tokens} tokens",
        f"accept_length {a:.4f} +- {error_a:.4f} | {b:.4f} +- {error_b:.4f}, ratio {ratio((a, b)):.4f}",
        f"accept_length of equal answers {equal_a:.4f} | {equal_b:.4f}, ratio {ratio((equal_a, equal_b)):.4f}",
    ]
    return "\n".join(lines)
