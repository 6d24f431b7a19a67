"""Stop strings in a text that comes in pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Passes text on up to the first stop string; keeps back what could still become one.

    First is the one that ends first, and of those ending together the longest: what a reader who
    goes through the text character by character sees. So the cut does not depend on the pieces.
    """

    __slots__ = ("_held", "_includes_stop", "_stops", "matched")

    def __init__(self, stops: Sequence[str], includes_stop: bool) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(stops)
        self._includes_stop = includes_stop
        self._held = ""
        self.matched = ""
        """The stop string that was found; nothing is passed on after it."""

    def feed(self, text: str) -> str:
        """The text that is now certain to come before any stop string."""
        if self.matched or not text:
            return ""
        text = self._held + text
        if found := self._first_match(text):
            start, end = found
            self.matched = text[start:end]
            self._held = ""
            return text[: end if self._includes_stop else start]
        keep_from = self._possible_start(text)
        self._held = text[keep_from:]
        return text[:keep_from]

    def flush(self) -> str:
        """What was kept back; the text is over, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int] | None:
        """[start, end) of the first match, None if there is none."""
        starts = [(text.find(stop), len(stop)) for stop in self._stops]
        ends = [(start + length, start) for start, length in starts if start >= 0]
        if not ends:
            return None
        end, start = min(ends)
        return start, end

    def _possible_start(self, text: str) -> int:
        """Start of the longest end of text that a stop string begins with; len(text) if there is none."""
        longest = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= start < longest:
                if stop.startswith(text[start:]):
                    longest = start
                start = text.find(stop[0], start + 1)
        return longest
