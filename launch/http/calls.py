"""One HTTP request in flight: its choices gather output until the answer takes it."""

import asyncio
import time

from launch.http.errors import ApiError
from launch.http.generation import Generation
from memsvc.wire.base import FinishReason
from memsvc.wire.text import Usage


class Choice:
    """Output of one choice. Text that the client did not take yet is joined, so a slow client costs no queue."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.prompt_tokens = 0
        self.num_tokens = 0
        self.finish = FinishReason.RUNNING
        self.usage: Usage | None = None
        self.stop_text = ""
        self.first_token_at = 0.0
        self.last_token_at = 0.0
        self._texts: list[str] = []

    def put(self, text: str, num_tokens: int, now: float) -> None:
        """More output has come."""
        if text:
            self._texts.append(text)
        if num_tokens:
            self.first_token_at = self.first_token_at or now
            self.last_token_at = now
            self.num_tokens += num_tokens

    def end(self, finish: FinishReason, usage: Usage, stop_text: str) -> None:
        """The choice is complete."""
        self.finish = finish
        self.usage = usage
        self.prompt_tokens = usage.prompt_tokens
        self.stop_text = stop_text

    def take_text(self) -> str:
        """Text since the last call."""
        text = "".join(self._texts)
        self._texts.clear()
        return text

    @property
    def has_news(self) -> bool:
        """Whether there is text to take, or an end to tell."""
        return bool(self._texts) or self.finish is not FinishReason.RUNNING

    def matched_stop(self) -> str | int | None:
        """The stop string or the token that ended the choice."""
        if self.stop_text:
            return self.stop_text
        if self.usage is not None and self.usage.matched_stop >= 0:
            return self.usage.matched_stop
        return None

    def stop_reason(self, stop_token_ids: list[int]) -> str | int | None:
        """The same, with null for the end-of-sequence token."""
        matched = self.matched_stop()
        return matched if isinstance(matched, str) or matched in stop_token_ids else None


class Call:
    """All choices of one HTTP request. The engine fills it, its answer waits on `news`."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.choices = [Choice(index) for index in range(generation.num_choices)]
        self.error: ApiError | None = None
        self.is_gone = False
        """The client hung up."""
        self.started_at = time.monotonic()
        self._news = asyncio.Event()

    def wake(self) -> None:
        """Something changed."""
        self._news.set()

    def hang_up(self) -> None:
        """The client is not there any more."""
        self.is_gone = True
        self.wake()

    def fail(self, error: ApiError) -> None:
        """The call ends with an error; the first one counts."""
        self.error = self.error or error
        self.wake()

    async def news(self) -> None:
        """Wait until something changed since the last wait."""
        await self._news.wait()
        self._news.clear()

    @property
    def is_done(self) -> bool:
        """Whether every choice is complete."""
        return all(choice.finish is not FinishReason.RUNNING for choice in self.choices)

    @property
    def has_news(self) -> bool:
        """Whether any choice has something to take."""
        return any(choice.has_news for choice in self.choices)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens, each prompt counted once however many choices it has."""
        return sum(choice.prompt_tokens for choice in self.choices[:: self.generation.num_per_prompt])

    @property
    def usages(self) -> list[Usage]:
        """Usage of the complete choices."""
        return [choice.usage for choice in self.choices if choice.usage is not None]
