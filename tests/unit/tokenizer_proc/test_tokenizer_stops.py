"""Stop strings: the text is cut where a reader going character by character would cut it."""

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tokenizer_proc.decode import TextDecoder, TextStream
from tokenizer_proc.pieces import TokenPieces, decode_rules
from tokenizer_proc.stops import StopMatcher

LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """[start, end) by trying every end from the left, longest stop string first."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end - len(stop), end
    return None


def held_back(text: str, stops: list[str]) -> int:
    """Length of the longest end of text that begins a stop string."""
    lengths = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
    return max(lengths, default=0)


@given(parts=st.lists(LETTERS, max_size=6), stops=STOPS, includes_stop=st.booleans())
@settings(max_examples=120, deadline=None)
def test_matcher_cuts_and_holds_back_as_the_definition_says(
    parts: list[str], stops: list[str], includes_stop: bool
) -> None:
    matcher = StopMatcher(stops, includes_stop)
    seen = given_out = ""
    for part in parts:
        seen += part
        given_out += matcher.feed(part)
        found = first_stop(seen, stops)
        if found:
            start, end = found
            assert given_out == seen[: end if includes_stop else start]
            assert matcher.matched == seen[start:end]
        else:
            assert not matcher.matched
            assert given_out == seen[: len(seen) - held_back(seen, stops)]
    rest = matcher.flush()
    assert given_out + rest == (given_out if matcher.matched else seen)


@given(text=st.text("ab", max_size=30), stop=st.text("ab", min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_one_stop_string_cuts_where_str_find_does(text: str, stop: str) -> None:
    matcher = StopMatcher([stop], includes_stop=False)
    out = "".join(matcher.feed(character) for character in text) + matcher.flush()
    assert out == (text if stop not in text else text[: text.find(stop)])


TEXTS = st.text("ab \u00e9\u4f60\U0001f600", max_size=40)


@given(text=TEXTS, stop=st.text("ab \u4f60", min_size=1, max_size=3), cuts=st.lists(st.integers(1, 6), min_size=1))
@settings(max_examples=150, deadline=None)
def test_stream_of_tokens_is_cut_by_str_find_on_the_full_text(
    byte_level: Tokenizer, text: str, stop: str, cuts: list[int]
) -> None:
    token_ids = byte_level.encode(text).ids
    stream = new_stream(byte_level, [stop])
    out, start, number = "", 0, 0
    while start < len(token_ids):
        size = cuts[number % len(cuts)]
        out += stream.feed(token_ids[start : start + size])
        start, number = start + size, number + 1
    out += stream.flush()
    assert out == (text[: text.find(stop)] if stop in text else text)
    assert bool(stream.matched) == (stop in text)
    assert stream.num_tokens == tokens_up_to_stop(byte_level, token_ids, stop)


def tokens_up_to_stop(tokenizer: Tokenizer, token_ids: list[int], stop: str) -> int:
    """How many tokens it takes until the stop string stands in their text."""
    for num in range(1, len(token_ids)):
        if stop in tokenizer.decode(token_ids[:num]):
            return num
    return len(token_ids)


@given(text=TEXTS, stops=st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3), data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_second_stream_fed_with_the_first_tokens_goes_on_where_the_first_one_was(
    byte_level: Tokenizer, text: str, stops: list[str], data: st.DataObject
) -> None:
    token_ids = byte_level.encode(text).ids
    cut = data.draw(st.integers(0, len(token_ids)))
    whole, first, second = (new_stream(byte_level, stops) for _ in range(3))
    before = "".join(first.feed([token_id]) for token_id in token_ids[:cut])
    assert second.feed(token_ids[:cut]) == before
    after = second.feed(token_ids[cut:]) + second.flush()
    assert before + after == whole.feed(token_ids) + whole.flush()
    assert (second.num_tokens, second.matched) == (whole.num_tokens, whole.matched)


@pytest.mark.parametrize(
    ("stops", "text", "out", "matched"),
    [
        (["abcdef", "cd"], "xabcdef", "xab", "cd"),
        (["ab", "b"], "xab", "x", "ab"),
        (["b", "ab"], "xab", "x", "ab"),
        (["aab"], "aaab", "a", "aab"),
        (["\n\n"], "one\n\ntwo", "one", "\n\n"),
    ],
)
def test_which_of_several_stop_strings_is_first(stops: list[str], text: str, out: str, matched: str) -> None:
    for parts in ([text], list(text)):
        matcher = StopMatcher(stops, includes_stop=False)
        assert "".join(matcher.feed(part) for part in parts) == out
        assert matcher.matched == matched


def test_a_stop_string_may_be_the_replacement_of_a_half_character(byte_level: Tokenizer) -> None:
    half = byte_level.encode("\U0001f9e9").ids[:2]
    stream = new_stream(byte_level, ["\ufffd"])
    assert stream.feed([*byte_level.encode("ok").ids, *half]) == "ok"
    assert stream.flush() == ""
    assert stream.matched == "\ufffd"


@cache
def pieces_of(tokenizer: Tokenizer) -> TokenPieces:
    return TokenPieces(tokenizer, decode_rules(json.loads(tokenizer.to_str())["decoder"]))


def new_stream(tokenizer: Tokenizer, stops: list[str]) -> TextStream:
    return TextStream(TextDecoder(pieces_of(tokenizer), at_start=True), stops)
