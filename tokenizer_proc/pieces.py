"""What each token contributes to the text, in bytes.

A decoder of the tokenizers library turns tokens into one string. The two families that chat models
use, byte-level BPE and SentencePiece style, do so token by token except for the start of the text
and for characters spread over several tokens. So the bytes of a token can be looked up, and a
UTF-8 decoder that keeps an unfinished character does the rest, at a cost that does not grow with
the answer. The library's own DecodeStream decodes all tokens since its last output again and never
gives the unfinished rest away, which random weights make quadratic.

One difference remains, and only for byte tokens (<0xE2>) that are no UTF-8: the library then writes
a U+FFFD for each byte of the whole run of them, valid characters in it included, which it could not
do any more had it shown those; here only the bytes that are wrong become U+FFFD.
"""

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN_LEN = len("<0x00>")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRules:
    """How the `decoder` entry of a tokenizer.json makes text of tokens."""

    byte_level: bool = False
    """Each character of a token stands for a byte."""
    replacements: tuple[tuple[str, str], ...] = ()
    """Replaced in each token, in this order."""
    byte_fallback: bool = False
    """Tokens of the form <0xE2> stand for a byte."""
    strips_space: bool = False
    """One space at the start of the text is dropped."""
    drops_leading: str = ""
    """This character is dropped from the first token of the text, wherever it stands in it."""


def decode_rules(decoder: Any) -> DecodeRules:
    """The rules of a decoder as tokenizer.json spells it.

    Raises ValueError on a decoder whose text is not a plain sequence of what its tokens stand for.
    """
    match decoder:
        case {"type": "ByteLevel"}:
            return DecodeRules(byte_level=True)
        case {"type": "Metaspace", "replacement": str(mark)}:
            keeps_first = decoder.get("prepend_scheme", "always") == "never" or decoder.get("add_prefix_space") is False
            return DecodeRules(replacements=((mark, " "),), drops_leading="" if keeps_first else mark)
        case {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}:
            return DecodeRules(byte_level=True)
        case {"type": "Sequence", "decoders": [*steps]}:
            return _sentencepiece_rules(steps)
        case _:
            kind = decoder.get("type") if isinstance(decoder, dict) else decoder
            raise ValueError(f"decoder {kind!r} of tokenizer.json can't be streamed: ByteLevel and SentencePiece can")


def _sentencepiece_rules(steps: list[Any]) -> DecodeRules:
    """Rules of Replace*, ByteFallback?, Fuse?, Strip?, the chain that SentencePiece models are exported with."""
    replacements: list[tuple[str, str]] = []
    seen: list[str] = []
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not seen:
                replacements.append((old, new))
            case {"type": "ByteFallback"} if not seen:
                seen.append("ByteFallback")
            case {"type": "Fuse"} if "Fuse" not in seen:
                seen.append("Fuse")
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if seen[-1:] == ["Fuse"]:
                seen.append("Strip")
            case _:
                raise ValueError(f"decoder step {step} of tokenizer.json can't be streamed after {seen or 'nothing'}")
    return DecodeRules(
        replacements=tuple(replacements), byte_fallback="ByteFallback" in seen, strips_space="Strip" in seen
    )


class TokenPieces(dict[int, bytes]):
    """pieces[token_id] is what the token adds to the text; special and unknown tokens add nothing.

    Entries are made when first asked for: a vocabulary has 150,000 of them.
    """

    def __init__(self, tokenizer: Tokenizer, rules: DecodeRules) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._rules = rules
        self._byte_of_char = _byte_alphabet()
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)

    def __missing__(self, token_id: int) -> bytes:
        token = self._token(token_id)
        piece = self[token_id] = b"" if token is None else self._bytes_of(token)
        return piece

    def first(self, token_id: int) -> bytes:
        """What the token adds as the first one of a text that does not continue another."""
        if self._rules.strips_space:
            return self[token_id].removeprefix(b" ")
        if self._rules.drops_leading and (token := self._token(token_id)) is not None:
            return self._bytes_of(token.replace(self._rules.drops_leading, ""))
        return self[token_id]

    def _token(self, token_id: int) -> str | None:
        return None if token_id in self._special else self._tokenizer.id_to_token(token_id)

    def _bytes_of(self, token: str) -> bytes:
        rules = self._rules
        if rules.byte_level:
            try:
                return bytes(map(self._byte_of_char.__getitem__, token))
            except KeyError:
                return token.encode()  # an added token, spelled as it reads
        for old, new in rules.replacements:
            token = token.replace(old, new)
        if rules.byte_fallback and len(token) == _BYTE_TOKEN_LEN and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes.fromhex(token[3:5])
            except ValueError:
                pass  # only looks like one
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE.

    Printable Latin-1 characters stand for themselves; the other bytes take, in order, the
    characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update((chr(0x100 + index), byte) for index, byte in enumerate(others))
    return alphabet
