"""What the front measures itself: request counts by outcome and latency histograms."""

import bisect
from collections import Counter

from launch.http.calls import Choice
from memsvc.wire.base import FinishReason

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_ACCEPT_LENGTHS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 14.0, 16.0)


class Histogram:
    """Counts of values by upper bound, as Prometheus wants them."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """One more value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it), the last bound being +Inf."""
        total = 0
        rows: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
        return rows


class Tally:
    """Counts since the front started. A request with several choices counts once for each."""

    def __init__(self) -> None:
        self.ttft_s = Histogram(_SECONDS)
        self.chunk_gap_s = Histogram(_SECONDS)
        """Between two arrivals of tokens; with speculation an arrival has several tokens."""
        self.tpot_s = Histogram(_SECONDS)
        """Per token after the first, over a whole answer."""
        self.e2e_s = Histogram(_SECONDS)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self.accept_length = Histogram(_ACCEPT_LENGTHS)
        self.finished: Counter[FinishReason] = Counter()
        self.turned_away = 0

    def tokens(self, started_at: float, choice: Choice, num: int, now: float) -> None:
        """num tokens have come for a choice that does not know of them yet."""
        if not num:
            return
        if choice.num_tokens:
            self.chunk_gap_s.add(now - choice.last_token_at)
        else:
            self.ttft_s.add(now - started_at)

    def ended(self, started_at: float, choice: Choice, finish: FinishReason) -> None:
        """A choice has ended in one way or another."""
        self.finished[finish] += 1
        if finish not in (FinishReason.STOP, FinishReason.LENGTH) or choice.usage is None:
            return
        self.e2e_s.add(choice.last_token_at - started_at if choice.num_tokens else 0.0)
        if choice.num_tokens > 1:
            self.tpot_s.add((choice.last_token_at - choice.first_token_at) / (choice.num_tokens - 1))
        self.prompt_tokens.add(choice.usage.prompt_tokens)
        self.generation_tokens.add(choice.usage.completion_tokens)
        steps = sum(choice.usage.accepted)
        if steps:
            self.accept_length.add(1 + sum(j * num for j, num in enumerate(choice.usage.accepted)) / steps)
