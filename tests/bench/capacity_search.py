"""How many requests of one length run at the same time: what a trial shows, and the search for the largest number."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from memsvc.core.geometry import requests_that_fit
from memsvc.wire.mem import KindLayout, Layout
from tests.bench.mixed_load import Ask
from tests.load.call import Call, Outcome

_STEP = 32
"""A search for more goes up by one part in so many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What became of so many requests that were sent at once."""

    num: int
    live: int
    """The most that had their first token and not yet their last."""
    retracted: int
    """How often one was taken back."""
    failed: int

    @property
    def fits(self) -> bool:
        """All ran at the same time: nobody waited for another's end, or was taken back."""
        return self.live == self.num and not self.retracted and not self.failed


def most_at_once(calls: Sequence[Call]) -> int:
    """Calls between first and last token at one time; when one begins as another ends, they are not both."""
    ends = [(call.last, -1) for call in calls if call.outcome is Outcome.COMPLETED]
    begins = [(call.first, 1) for call in calls if call.outcome is Outcome.COMPLETED]
    live = most = 0
    for _, change in sorted([*ends, *begins]):
        live += change
        most = max(most, live)
    return most


def asks_of(num: int, tokens: int, tail: int, *, tokens_a_step: float, budget: int) -> list[Ask]:
    """Requests that are sent at once and end together, at so many tokens each.

    While later prompts are computed, `budget` tokens a step, earlier requests decode. They begin with so much less that
    all are at tokens - tail when the last prompt is done. Raises ValueError if a prompt would have no token left.
    """
    steps_each = (tokens - tail) / budget
    prompts = [tokens - tail - ceil(tokens_a_step * steps_each * (num - 1 - i)) for i in range(num)]
    if prompts[0] < 1:
        raise ValueError(
            f"the first of {num} requests decodes {tokens - tail - prompts[0]} tokens before the last begins,"
            f" more than {tokens} - {tail}"
        )
    return [Ask(prompt, tokens - prompt) for prompt in prompts]


def planned(plan: dict[str, Any], tokens: int) -> int:
    """Requests of so many tokens that fit by the arithmetic of the memory plan of /server_info."""
    frame = plan["frame_bytes"]
    fixed = 1 + -(-plan["exchange_bytes"] // frame) + -(-plan["shared_bytes"] // frame)
    kinds = [KindLayout(**kind, num_pages=plan["num_frames"] * kind["pages_per_frame"]) for kind in plan["kinds"]]
    layout = Layout(
        arena_bytes=plan["arena_bytes"], frame_bytes=frame, num_frames=plan["num_frames"], page_size=0, kinds=kinds,
        exchange_offset=frame, exchange_bytes=plan["exchange_bytes"],
    )  # fmt: skip
    return requests_that_fit(layout, tokens, plan["num_frames"] - fixed, plan["slack_tokens"])


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to."""

    num: int
    """All of so many fit,"""
    is_most: bool
    """and one more does not: that was tried."""
    trials: list[Trial]


def search(attempt: Callable[[int], Trial], first: int, most: int, limit: int) -> Found:
    """The largest number that fits, 0 if not one does. first: the best guess. At most `limit` trials, of `most` each."""
    low, high, trials, num, failures = 0, most + 1, [], max(1, min(first, most)), 0
    while high - low > 1 and len(trials) < limit:
        trial = attempt(num)
        trials.append(trial)
        if trial.fits:
            low, failures = num, 0
            num = low + max(1, low // _STEP) if high > most else (low + high) // 2
        else:
            high, failures = num, failures + 1
            # Those that were live while others waited are likely the ones that fit, without those that were taken back.
            num = min(trial.live - trial.retracted, high - 2 ** (failures - 1))
        if not low < num < high:
            num = (low + high) // 2
    return Found(low, high - low == 1 and high <= most, trials)
