"""Documents of the corpus: how their text is cleaned, which are dropped, and which are never trained on."""

import hashlib
import re
from dataclasses import dataclass
from itertools import pairwise

MIN_BYTES = 200
MAX_BYTES = 256 << 10
"""Larger files are tables or generated code almost without exception."""
HELD_OUT_PREFIXES = ("00", "01", "02")
"""Of the SHA-256 of the text in hexadecimal: 3 of 256 documents, about 1 %."""

_MAX_NON_ASCII = 0.01
_MIN_LETTERS = 0.45
"""Least share of letters among the characters that are not white space: prose has 0.95, code 0.7."""
_MAX_DIGITS = 0.2
_MAX_SEEN = 0.5
"""A document is a near duplicate if more of its bytes stand in lines of earlier ones."""
_MIN_LINE = 24
"""Shorter lines are alike by chance."""
_HEAD_LINES = 8
_GENERATED = re.compile(
    r"""^\s*(#|"").*(auto(matically)?[- ]?generated|@generated|generated (by|from|automatically)|do not (edit|modify))""",
    re.I | re.M,
)
"""In comments and where docstrings begin; prose may speak of generated code."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\ufeff\ufffd]")
_TYPOGRAPHIC = {
    0xA0: " ", 0xAB: '"', 0xAD: "", 0xB4: "'", 0xBB: '"', 0xD7: "x", 0x2002: " ", 0x2003: " ", 0x2009: " ",
    0x2010: "-", 0x2011: "-", 0x2012: "-", 0x2013: "-", 0x2014: "--", 0x2018: "'", 0x2019: "'", 0x201C: '"',
    0x201D: '"', 0x2022: "-", 0x2026: "...", 0x202F: " ", 0x2190: "<-", 0x2192: "->", 0x2212: "-", 0x2264: "<=",
    0x2265: ">=",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text of the corpus."""

    source: str
    """Name of the source it comes from."""
    name: str
    """Which one of that source, a path in most."""
    text: str
    """As clean() leaves it."""

    @property
    def held_out(self) -> bool:
        """Whether it is kept from training. Depends on the text only."""
        return is_held_out(self.text)


def is_held_out(text: str) -> bool:
    """Whether a text is one of the about 1 % that are never trained on."""
    return hashlib.sha256(text.encode()).hexdigest().startswith(HELD_OUT_PREFIXES)


def clean(text: str) -> str:
    """Typographic marks in ASCII, no control characters, no blanks at line ends, at most two empty lines in a row."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").translate(_TYPOGRAPHIC).expandtabs(8)
    text = _CONTROL.sub("", text)
    text = "\n".join(line.rstrip() for line in text.split("\n")).strip("\n")
    return re.sub(r"\n{4,}", "\n\n\n", text) + "\n"


class Sieve:
    """Says which texts to drop. Near duplicates are those of texts that it let pass before."""

    def __init__(self) -> None:
        self._texts: set[bytes] = set()
        self._lines: set[bytes] = set()

    def objection(self, text: str) -> str | None:
        """Why a clean text is no part of the corpus in one word, or None if it is one from now on."""
        objection = _objection(text)
        if objection is not None:
            return objection
        digest = hashlib.sha256(text.encode()).digest()
        lines = _line_digests(text)
        num_bytes = sum(lines.values())
        seen = sum(length for line, length in lines.items() if line in self._lines)
        if digest in self._texts or (num_bytes and seen > _MAX_SEEN * num_bytes):
            return "duplicate"
        self._texts.add(digest)
        self._lines.update(lines)
        return None


def parts_at(text: str, starts: re.Pattern[str]) -> list[str]:
    """The text cut before each line that the pattern matches."""
    cuts = [0, *(match.start() for match in starts.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(cuts) if end > start]


def _objection(text: str) -> str | None:
    """What is wrong with a text by itself."""
    num_bytes = len(text.encode())
    if num_bytes < MIN_BYTES:
        return "short"
    if num_bytes > MAX_BYTES:
        return "long"
    if _GENERATED.search("\n".join(text.split("\n", _HEAD_LINES)[:_HEAD_LINES])):
        return "generated"
    if sum(not char.isascii() for char in text) > _MAX_NON_ASCII * len(text):
        return "non_ascii"
    marks = "".join(text.split())
    letters, digits = sum(map(str.isalpha, marks)), sum(map(str.isdigit, marks))
    return "numbers" if letters < _MIN_LETTERS * len(marks) or digits > _MAX_DIGITS * len(marks) else None


def _line_digests(text: str) -> dict[bytes, int]:
    """Digest and bytes of each line that is long enough to tell texts apart."""
    lines = {line.strip() for line in text.split("\n")}
    return {
        hashlib.blake2b(line.encode(), digest_size=8).digest(): len(line) for line in lines if len(line) >= _MIN_LINE
    }
