"""Manual pages in mdoc as plain text: paragraphs in one line each, examples as they stand, no licence header."""

import re
import shlex

_ENCLOSING = {
    "Op": "[]", "Oo": "[]", "Bq": "[]", "Bo": "[]", "Brq": "{}", "Bro": "{}", "Pq": "()", "Po": "()", "Aq": "<>",
    "Ao": "<>", "Dq": '""', "Do": '""', "Qq": '""', "Qo": '""', "Sq": "''", "So": "''", "Ql": "''",
}  # fmt: skip
_OPENING = {"Oo", "Bo", "Bro", "Po", "Ao", "Do", "Qo", "So"}
_CLOSING = {"Oc": "]", "Bc": "]", "Brc": "}", "Pc": ")", "Ac": ">", "Dc": '"', "Qc": '"', "Sc": "'"}
_NAMES = {
    "Fx": "FreeBSD", "Nx": "NetBSD", "Ox": "OpenBSD", "Bx": "BSD", "Bsx": "BSD/OS", "Dx": "DragonFly", "Ux": "UNIX",
    "At": "AT&T UNIX",
}  # fmt: skip
_PLAIN = {
    "Ad", "Ar", "Cd", "Cm", "Dv", "Em", "Er", "Ev", "Fa", "Fd", "Ft", "Ic", "Lb", "Li", "Lk", "Ms", "Mt", "No", "Nd",
    "Pa", "St", "Sx", "Sy", "Tn", "Va", "Vt", "An",
}  # fmt: skip
_CALLABLE = _PLAIN | set(_ENCLOSING) | set(_CLOSING) | set(_NAMES) | {"Fl", "Fn", "In", "Nm", "Ns", "Pf", "Xr"}
_SILENT = {"Dd", "Dt", "Os", "Bk", "Ek", "Rs", "Re", "Bf", "Ef", "Sm", "Ud", "Rv", "Ex"}
"""Macros without text of their own."""
_DROPPED_SECTIONS = {"AUTHORS", "LIBRARY"}
_CLOSERS = frozenset(".,:;)]?!")
_GLYPHS = {
    "em": "--", "en": "-", "hy": "-", "mi": "-", "mu": "x", "**": "*", ">=": ">=", "<=": "<=", "+-": "+-", "bu": "-",
    "aq": "'", "dq": '"', "lq": '"', "rq": '"', "rs": "\\", "ba": "|", "co": "(c)", "Lt": "<", "Gt": ">", "Le": "<=",
    "Ge": ">=", "Ne": "!=", "Pm": "+-", "Ba": "|", "Am": "&", "lp": "(", "rp": ")",
}  # fmt: skip
_ESCAPE = re.compile(r"\\(?:f(?:\(..|.)|s[-+]?\d+|[(*]\(?\[?(?P<glyph>[A-Za-z*<>+=-]{2})\]?|(?P<char>.))")


def man_to_text(page: str) -> str:
    """The readable text of an mdoc page; empty for pages in other macros."""
    if not re.search(r"^\.Dt ", page, re.M):
        return ""
    reader = _Reader()
    for line in page.replace("\\\n", "").split("\n"):
        reader.read(line)
    return reader.text()


def _unescaped(text: str) -> str:
    def plain(match: re.Match[str]) -> str:
        if glyph := match["glyph"]:
            return _GLYPHS.get(glyph, "")
        return {"-": "-", "e": "\\", "\\": "\\", " ": " ", "~": " ", "0": " ", "'": "'", ".": "."}.get(
            match["char"] or "", ""
        )

    return _ESCAPE.sub(plain, text)


def _words(rest: str) -> list[str]:
    """Arguments of a macro; quotes hold words together."""
    lexer = shlex.shlex(rest.split(' \\"')[0], posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.quotes, lexer.escape, lexer.commenters = True, '"', "", ""
    try:
        return list(lexer)
    except ValueError:
        return rest.replace('"', "").split()


class _Line:
    """Words of one line with blanks where they belong."""

    def __init__(self, page_name: str, in_synopsis: bool) -> None:
        self._page_name = page_name
        self._in_synopsis = in_synopsis
        self._text = ""
        self._glued = True

    def text_of(self, words: list[str]) -> str:
        """The words of a line that begins with a macro, as they read."""
        ends = ""
        while words:
            word, words = words[0], words[1:]
            if word in _ENCLOSING:
                self._add(_ENCLOSING[word][0], opens=True)
                ends = ends if word in _OPENING else _ENCLOSING[word][1] + ends
            elif word in _CALLABLE:
                words = self._call(word, words)
            else:
                ends = self._literal(word, words, ends)
        return self._text + ends

    def _literal(self, word: str, rest: list[str], ends: str) -> str:
        """Adds a word; punctuation that ends the line stands behind what is open."""
        if word in _CLOSERS and ends and all(mark in _CLOSERS for mark in rest):
            self._text += ends
            ends = ""
        self._add(_unescaped(word), opens=word in ("(", "["))
        return ends

    def _call(self, macro: str, words: list[str]) -> list[str]:
        """Adds what a macro makes of its arguments, and returns those it leaves."""
        if macro in _CLOSING:
            self._text += _CLOSING[macro]
        elif macro in _NAMES:
            self._add(_NAMES[macro])
        elif macro == "Ns":
            self._glued = True
        elif macro == "Pf":
            self._add(_unescaped(words[0]) if words else "", opens=True)
            return words[1:]
        elif macro == "Nm" and not (words and words[0] not in _CALLABLE | _CLOSERS):
            self._add(self._page_name)
        elif macro in ("Fl", "Xr", "Fn", "In"):
            return self._with_arguments(macro, words)
        return words

    def _with_arguments(self, macro: str, words: list[str]) -> list[str]:
        num = next((i for i, word in enumerate(words) if word in _CALLABLE | _CLOSERS), len(words))
        arguments, rest = [_unescaped(word) for word in words[:num]], words[num:]
        match macro, arguments:
            case "Fl", _:
                self._add(" ".join(f"-{flag}" for flag in arguments) or "-")
            case "Xr", [name, section, *more]:
                self._add(" ".join([f"{name}({section})", *more]))
            case "Fn", [name, *parameters]:
                self._add(f"{name}({', '.join(parameters)})")
            case "In", [name, *_]:
                self._add(f"#include <{name}>" if self._in_synopsis else f"<{name}>")
            case _:
                self._add(" ".join(arguments))
        return rest

    def _add(self, word: str, *, opens: bool = False) -> None:
        if self._text and not self._glued and word not in _CLOSERS:
            self._text += " "
        self._text += word
        self._glued = opens


class _Reader:
    def __init__(self) -> None:
        self._lines: list[str] = []
        self._paragraph: list[str] = []
        self._name = ""
        self._section = ""
        self._verbatim = False
        self._function: list[str] | None = None

    def text(self) -> str:
        """What has been read."""
        self._end_paragraph()
        return re.sub(r"\n{3,}", "\n\n", "\n".join(self._lines)).strip("\n") + "\n"

    def read(self, line: str) -> None:
        """One line of the page."""
        if line.startswith(("'", '.\\"', "'\\\"")):
            return
        if line.startswith("."):
            macro, _, rest = line[1:].strip().partition(" ")
            self._macro(macro, _words(rest))
        elif self._section not in _DROPPED_SECTIONS:
            self._text_line(line)

    def _text_line(self, line: str) -> None:
        if self._verbatim:
            self._lines.append("    " + _unescaped(line))
        elif line.strip():
            self._paragraph.append(_unescaped(line.strip()))
        else:
            self._end_paragraph(spaced=True)

    def _macro(self, macro: str, words: list[str]) -> None:
        match macro:
            case "Sh" | "Ss":
                self._end_paragraph(spaced=True)
                self._section = " ".join(words) if macro == "Sh" else self._section
                if self._section not in _DROPPED_SECTIONS:
                    self._lines += [f"{'#' if macro == 'Sh' else '##'} {self._inline(words)}", ""]
            case "Pp" | "Bl" | "El" | "LP" | "PP":
                self._end_paragraph(spaced=True)
            case "Bd" | "Ed":
                self._end_paragraph(spaced=True)
                self._verbatim = macro == "Bd" and any(word in ("-literal", "-unfilled") for word in words)
            case _ if self._section not in _DROPPED_SECTIONS and macro[:1].isupper():
                self._content(macro, words)

    def _content(self, macro: str, words: list[str]) -> None:
        if macro == "Nm" and words and not self._name:
            self._name = words[0]
        if macro == "Fo":
            self._function = words[:1]
        elif macro == "Fa" and self._function is not None:
            self._function.append(" ".join(words))
        elif macro == "Fc" and self._function is not None:
            function, self._function = self._function, None
            self._phrase("Fn", [*function, *words])
        elif macro == "It":
            self._end_paragraph()
            self._lines.append("- " + self._inline(words))
        elif macro in ("Dl", "D1"):
            self._end_paragraph()
            self._lines.append("    " + self._inline(words))
        elif macro not in _SILENT:
            self._phrase(macro, words)

    def _phrase(self, macro: str, words: list[str]) -> None:
        """A part of a sentence, or a line of the synopsis."""
        in_synopsis = self._section == "SYNOPSIS"
        if in_synopsis and macro in ("Ft", "In", "Cd", "Fd"):
            self._end_paragraph()
        text = self._inline([macro, *words] if macro in _CALLABLE else words)
        if in_synopsis and macro == "Fn" and not self._verbatim:
            text += ";"
        self._put("- " + text if macro == "Nd" else text)
        if in_synopsis and macro == "Fn":
            self._end_paragraph()

    def _put(self, text: str) -> None:
        if self._verbatim:
            self._lines.append("    " + text)
        elif text:
            self._paragraph.append(text)

    def _inline(self, words: list[str]) -> str:
        return _Line(self._name, self._section == "SYNOPSIS").text_of(words)

    def _end_paragraph(self, *, spaced: bool = False) -> None:
        if self._paragraph:
            self._lines.append(" ".join(self._paragraph))
            self._paragraph = []
        if spaced and self._lines and self._lines[-1]:
            self._lines.append("")
