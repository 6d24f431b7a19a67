"""What the choice of one request's next token depends on besides the logits."""

from collections.abc import Collection, Mapping

import numpy as np

from memsvc.wire.base import FinishReason
from memsvc.wire.text import Sampling

GREEDY_BELOW = 1e-5
"""Temperatures under this are taken as 0."""


class RowSampler:
    """Sampling state of one request, one row ahead: it stands before the token at index `position`.

    push moves it by a token; so in a verify block row j sees the counts of the prefix and t_1..t_j.
    Token counts are kept only while a penalty is on.
    """

    __slots__ = ("_counts", "_seen", "last", "n_out", "num_tokens", "params", "stop_ids", "withheld_ids")

    def __init__(self, params: Sampling, *, eos_ids: Collection[int], prompt: list[int], output: list[int]) -> None:
        """prompt: original prompt; output: what was given out so far, also before a restart or retraction."""
        self.params = params
        stops = frozenset(params.stop_token_ids)
        self.stop_ids = stops if params.ignore_eos else stops | frozenset(eos_ids)
        """Tokens that end the request; they are part of the output."""
        self.withheld_ids = sorted(stops | frozenset(eos_ids)) if params.min_tokens > 0 else []
        """Tokens that cannot be chosen before min_tokens."""
        self.num_tokens = len(prompt) + len(output)
        self.n_out = len(output)
        self.last = output[-1] if output else -1
        """The newest token of the output, -1 before the first."""
        self._counts: dict[int, int] | None = None
        self._seen: frozenset[int] = frozenset()
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            self._counts = {}
            if params.repetition_penalty != 1.0:
                self._seen = frozenset(prompt)
            for token in output:
                self._counts[token] = self._counts.get(token, 0) + 1

    @property
    def position(self) -> int:
        """Index of the next token in prompt + output: the position its noise is keyed by."""
        return self.num_tokens

    @property
    def is_greedy(self) -> bool:
        """The token is an argmax; noise plays no part."""
        return self.params.temperature < GREEDY_BELOW

    @property
    def has_penalty(self) -> bool:
        """Logits depend on the tokens so far."""
        return self._counts is not None

    @property
    def counts(self) -> Mapping[int, int]:
        """How often each token was given out; empty without a penalty."""
        return self._counts or {}

    @property
    def seen(self) -> Collection[int]:
        """Tokens of the prompt; empty without a repetition penalty."""
        return self._seen

    @property
    def withholds(self) -> bool:
        """min_tokens is not reached: withheld_ids cannot be chosen."""
        return self.n_out < self.params.min_tokens and bool(self.withheld_ids)

    @property
    def changes_logits(self) -> bool:
        """Something comes before temperature."""
        return self._counts is not None or self.withholds

    @property
    def has_filter(self) -> bool:
        """top_k, top_p or min_p cut the distribution."""
        params = self.params
        return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0

    @property
    def finish(self) -> FinishReason:
        """Why no token follows the last one, RUNNING if one does."""
        if self.n_out and self.last in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.n_out >= self.params.max_tokens else FinishReason.RUNNING

    def push(self, token: int) -> None:
        """token was chosen."""
        self.num_tokens += 1
        self.n_out += 1
        self.last = token
        if self._counts is not None:
            self._counts[token] = self._counts.get(token, 0) + 1

    def fork(self) -> "RowSampler":
        """An independent copy, for rows that may never happen."""
        other = object.__new__(RowSampler)
        for name in RowSampler.__slots__:
            setattr(other, name, getattr(self, name))
        other._counts = None if self._counts is None else dict(self._counts)
        return other

    def penalised_ids(self) -> np.ndarray:
        """int64 ids of all tokens whose logits a penalty changes."""
        if self._counts is None:
            return np.empty(0, dtype=np.int64)
        ids = self._seen.union(self._counts) if self._seen else self._counts
        return np.fromiter(ids, dtype=np.int64, count=len(ids))

    def penalise(self, token_ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        """Float32 logits [m] of token_ids [m] after repetition, frequency and presence penalty, in this order."""
        if self._counts is None:
            return logits
        params = self.params
        ids = token_ids.tolist()
        counts = np.array([self._counts.get(token, 0) for token in ids], dtype=np.float32)
        if params.repetition_penalty != 1.0:
            repeated = (counts > 0) | np.array([token in self._seen for token in ids], dtype=bool)
            scale = np.float32(params.repetition_penalty)
            logits = np.where(repeated, np.where(logits < 0, logits * scale, logits / scale), logits)
        logits = logits - np.float32(params.frequency_penalty) * counts
        return logits - np.float32(params.presence_penalty) * (counts > 0)

    def adjust(self, token_ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        """Penalties and min_tokens over a few candidates: float32 [m], what temperature then divides."""
        logits = self.penalise(token_ids, logits)
        if self.withholds:
            logits = np.where(np.isin(token_ids, self.withheld_ids), np.float32(-np.inf), logits)
        return logits
