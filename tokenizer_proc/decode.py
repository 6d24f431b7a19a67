"""Tokens of one answer to its text, as they come."""

import codecs
from collections.abc import Iterable, Sequence

from tokenizer_proc.pieces import TokenPieces
from tokenizer_proc.stops import StopMatcher

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TextDecoder:
    """Never splits a character: an unfinished one waits for its rest, or for proof that none comes.

    Bytes that are no UTF-8 become U+FFFD, one for each longest part that could have begun a character.
    """

    __slots__ = ("_at_start", "_pieces", "_utf8")

    def __init__(self, pieces: TokenPieces, *, at_start: bool) -> None:
        self._pieces = pieces
        self._utf8 = _utf8_decoder("replace")
        self._at_start = at_start

    def feed(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        pieces = self._pieces
        if not self._at_start:
            return self._utf8.decode(b"".join([pieces[token_id] for token_id in token_ids]))
        data = b""
        for token_id in token_ids:
            data += pieces.first(token_id) if self._at_start else pieces[token_id]
            # A token that adds nothing, such as a special one, leaves the start where it is.
            self._at_start = self._at_start and not pieces[token_id]
        return self._utf8.decode(data)

    def flush(self) -> str:
        """The unfinished character, as U+FFFD; the text is over."""
        return self._utf8.decode(b"", final=True)


class TextStream:
    """Text of one answer with its stop strings, and how many of its tokens count.

    What has been given out after n tokens depends on those n tokens alone, not on how they were
    cut into calls. So a stream that is fed again from the start continues where another one was.
    """

    __slots__ = ("_decoder", "_stops", "num_tokens")

    def __init__(self, decoder: TextDecoder, stops: Sequence[str] = (), *, includes_stop: bool = False) -> None:
        self._decoder = decoder
        self._stops = StopMatcher(stops, includes_stop) if stops else None
        self.num_tokens = 0
        """Tokens taken. Those after the one that completes a stop string are not."""

    @property
    def matched(self) -> str:
        """The stop string that ended the text, empty while none did."""
        return self._stops.matched if self._stops else ""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that is decided now; token_ids[num_tokens_after - num_tokens_before:] were not taken."""
        if self._stops is None:
            self.num_tokens += len(token_ids)
            return self._decoder.feed(token_ids)
        texts: list[str] = []
        for token_id in token_ids:
            if self._stops.matched:
                break
            texts.append(self._stops.feed(self._decoder.feed((token_id,))))
            self.num_tokens += 1
        return "".join(texts)

    def take_silently(self, token_ids: Sequence[int]) -> None:
        """Tokens that count and whose text is not wanted."""
        self.num_tokens += len(token_ids)

    def flush(self) -> str:
        """All that was kept back; the answer is over."""
        rest = self._decoder.flush()
        if self._stops is None:
            return rest
        return self._stops.feed(rest) + self._stops.flush()
