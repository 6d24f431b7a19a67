"""The streamed text is the text of all tokens, however they are cut, and no character is cut."""

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from tokenizer_proc.decode import TextDecoder, TextStream
from tokenizer_proc.pieces import TokenPieces, decode_rules

TEXTS = st.text(st.characters(codec="utf-8"), max_size=60) | st.text("ab \n\u00e9\u4f60\U0001f600\ufffd", max_size=40)
CUTS = st.lists(st.integers(min_value=1, max_value=5), min_size=1, max_size=50)


@cache
def pieces_of(tokenizer: Tokenizer) -> TokenPieces:
    return TokenPieces(tokenizer, decode_rules(json.loads(tokenizer.to_str())["decoder"]))


def chunks(token_ids: list[int], cuts: list[int]) -> list[list[int]]:
    """token_ids cut in chunks of the given sizes, again and again."""
    out, start, number = [], 0, 0
    while start < len(token_ids):
        size = cuts[number % len(cuts)]
        out.append(token_ids[start : start + size])
        start, number = start + size, number + 1
    return out


def streamed(decoder: TextDecoder | TextStream, parts: list[list[int]]) -> list[str]:
    return [*(decoder.feed(part) for part in parts), decoder.flush()]


@given(text=TEXTS, cuts=CUTS)
@settings(max_examples=120, deadline=None)
def test_byte_level_stream_equals_full_decode(byte_level: Tokenizer, text: str, cuts: list[int]) -> None:
    token_ids = byte_level.encode(text, add_special_tokens=False).ids
    decoder = TextDecoder(pieces_of(byte_level), at_start=True)
    out = streamed(decoder, chunks(token_ids, cuts))
    assert "".join(out) == byte_level.decode(token_ids) == text
    assert text or out == [""]


@given(token_ids=st.lists(st.integers(min_value=0, max_value=520), max_size=40), cuts=CUTS)
@settings(max_examples=150, deadline=None)
def test_random_tokens_give_what_the_library_gives(
    byte_level: Tokenizer, token_ids: list[int], cuts: list[int]
) -> None:
    # Half characters, bytes that are no UTF-8, special tokens and ids past the vocabulary among them.
    decoder = TextDecoder(pieces_of(byte_level), at_start=False)
    assert "".join(streamed(decoder, chunks(token_ids, cuts))) == byte_level.decode(token_ids)


@given(data=st.binary(max_size=24), cuts=CUTS)
@settings(max_examples=150, deadline=None)
def test_any_bytes_give_what_the_library_gives(data: bytes, cuts: list[int]) -> None:
    tokenizer, ids = byte_tokenizer()
    token_ids = [ids[byte] for byte in data]
    decoder = TextDecoder(pieces_of(tokenizer), at_start=False)
    assert "".join(streamed(decoder, chunks(token_ids, cuts))) == tokenizer.decode(token_ids)


@given(text=TEXTS, cuts=CUTS)
@settings(max_examples=120, deadline=None)
def test_sentencepiece_stream_equals_full_decode(sentencepiece: Tokenizer, text: str, cuts: list[int]) -> None:
    token_ids = sentencepiece.encode(text, add_special_tokens=False).ids
    decoder = TextDecoder(pieces_of(sentencepiece), at_start=True)
    assert "".join(streamed(decoder, chunks(token_ids, cuts))) == sentencepiece.decode(token_ids)


@given(prompt=TEXTS, text=TEXTS)
@settings(max_examples=100, deadline=None)
def test_text_that_continues_a_prompt_keeps_its_space(sentencepiece: Tokenizer, prompt: str, text: str) -> None:
    head = sentencepiece.encode("x" + prompt, add_special_tokens=False).ids
    tail = sentencepiece.encode(text, add_special_tokens=False).ids
    decoder = TextDecoder(pieces_of(sentencepiece), at_start=False)
    assert sentencepiece.decode(head) + "".join(streamed(decoder, [tail])) == sentencepiece.decode(head + tail)


def test_no_replacement_character_before_it_is_certain(byte_level: Tokenizer) -> None:
    pieces = pieces_of(byte_level)
    for text in ("\U0001f9e9", "\u8b1d", "\u0142"):
        token_ids = byte_level.encode(text).ids
        assert len(token_ids) >= 2
        assert streamed(TextDecoder(pieces, at_start=True), [[token_id] for token_id in token_ids]) == [
            *([""] * (len(token_ids) - 1)),
            text,
            "",
        ]


def test_half_a_character_shows_when_the_next_token_or_the_end_proves_it() -> None:
    tokenizer, ids = byte_tokenizer()
    decoder = TextDecoder(pieces_of(tokenizer), at_start=True)
    out = [decoder.feed([ids[byte]]) for byte in b"a\xf0\x9fb\xff\xe4\xbd"]
    assert out == ["a", "", "", "\ufffdb", "\ufffd", "", ""]
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def test_a_replacement_character_in_the_text_comes_at_once(byte_level: Tokenizer) -> None:
    decoder = TextDecoder(pieces_of(byte_level), at_start=True)
    assert decoder.feed(byte_level.encode("\ufffd").ids) == "\ufffd"


def test_special_tokens_add_nothing_and_other_added_tokens_their_own_text(byte_level: Tokenizer) -> None:
    tokenizer = Tokenizer.from_str(byte_level.to_str())
    tokenizer.add_tokens([AddedToken("<tool call>"), AddedToken("<think>")])
    pieces = pieces_of(tokenizer)
    ids = [tokenizer.token_to_id(token) for token in ("<|im_start|>", "<tool call>", "<think>", "<|im_end|>")]
    assert TextDecoder(pieces, at_start=True).feed([*ids, 10**6]) == "<tool call><think>" == tokenizer.decode(ids)


def test_special_tokens_leave_the_start_of_the_text_where_it_is(sentencepiece: Tokenizer) -> None:
    token_ids = [sentencepiece.token_to_id("<s>"), *sentencepiece.encode("the x").ids]
    for parts in ([token_ids], [[token_id] for token_id in token_ids]):
        decoder = TextDecoder(pieces_of(sentencepiece), at_start=True)
        assert "".join(streamed(decoder, parts)) == "the x" == sentencepiece.decode(token_ids)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_metaspace_decoder_gives_what_the_library_gives(scheme: str) -> None:
    tokens = ["\u2581\u2581", "\u2581a", "b\u2581", "c"]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    for token_ids in ([0, 1, 2], [1, 0, 3], [2, 2], [3, 0], [0]):
        decoder = TextDecoder(pieces_of(tokenizer), at_start=True)
        assert "".join(streamed(decoder, [[token_id] for token_id in token_ids])) == tokenizer.decode(token_ids)


def test_byte_tokens_keep_to_their_exact_form() -> None:
    tokens = ["<0x41>", "<0xZZ>", "<0x4>", "<0x1F>\u2581"]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    assert TextDecoder(pieces_of(tokenizer), at_start=True).feed([0, 1, 2, 3]) == tokenizer.decode([0, 1, 2, 3])


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 1}]},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]},
    ],
)
def test_decoders_that_cannot_be_streamed_are_refused_by_name(decoder: object) -> None:
    with pytest.raises(ValueError, match="can't be streamed"):
        decode_rules(decoder)


def byte_tokenizer() -> tuple[Tokenizer, dict[int, int]]:
    """One token a byte, and the token of each byte, found out through the library alone."""
    vocab = {chr(0x100 + number): number for number in range(68)}
    vocab.update({chr(code): 68 + code for code in range(0x21, 0x100) if code != 0xAD and not 0x7F <= code <= 0xA0})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    others = iter(range(68))
    ids = {}
    for byte in range(256):
        stands_for_itself = 0x21 <= byte < 0x100 and byte != 0xAD and not 0x7F <= byte <= 0xA0
        ids[byte] = 68 + byte if stands_for_itself else next(others)
    return tokenizer, ids
