"""Manuals in HTML as plain text: paragraphs in one line each, code as it stands, navigation left out."""

import re
from html.parser import HTMLParser

_BLOCKS = {
    "address", "article", "aside", "blockquote", "body", "caption", "dd", "details", "div", "dl", "dt", "fieldset",
    "figure", "form", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "html", "li", "main", "ol", "p", "pre", "section",
    "summary", "table", "tbody", "tfoot", "thead", "tr", "ul",
}  # fmt: skip
_SPACED = _BLOCKS - {"dd", "dt", "li", "tr"}
"""Blocks with an empty line around them."""
_SKIPPED_TAGS = {"button", "head", "nav", "script", "style"}
_SKIPPED_MARKS = {
    "admonition-versions", "footer", "ft", "global-nav", "hd", "headerlink", "linenos", "nav", "navfooter",
    "navheader", "related", "searchbox", "sidebar", "sphinxsidebar", "toc", "viewcode-back",
}  # fmt: skip
"""Class names and ids of what is no text of the page."""
_BLANKS = re.compile(r"\s+")


def html_to_text(html: str) -> str:
    """The readable text of a page. Headings carry as many # as their level, list items a dash."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    return re.sub(r"\n{3,}", "\n\n", reader.text()).strip("\n") + "\n"


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._line = ""
        self._pre_depth = 0
        self._skipped: list[str] = []
        """Tag of the skipped element, once for each open tag of that name in it."""

    def text(self) -> str:
        """What has been read."""
        self._end_line()
        return "".join(self._parts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skipped:
            self._skipped.extend([tag] if tag == self._skipped[0] else [])
            return
        marks = {mark for name, value in attrs if name in ("class", "id") for mark in (value or "").split()}
        if tag in _SKIPPED_TAGS or marks & _SKIPPED_MARKS:
            self._skipped.append(tag)
            return
        self._begin(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._skipped:
            if tag == self._skipped[0]:
                self._skipped.pop()
            return
        if tag in _BLOCKS:
            self._end_block(tag)
        if tag == "pre":
            self._pre_depth = max(0, self._pre_depth - 1)

    def handle_data(self, data: str) -> None:
        if self._skipped:
            return
        if self._pre_depth:
            self._parts.append(data)
            return
        data = _BLANKS.sub(" ", data)
        self._line += data.lstrip() if not self._line or self._line.endswith(" ") else data

    def _begin(self, tag: str) -> None:
        if tag in _BLOCKS:
            self._end_block(tag)
        match tag:
            case "h1" | "h2" | "h3" | "h4" | "h5" | "h6":
                self._line = "#" * int(tag[1]) + " "
            case "li":
                self._line = "- "
            case "br":
                self._end_line()
            case "td" | "th" if self._line.strip():
                self._line = self._line.rstrip() + " | "
            case "pre":
                self._pre_depth += 1

    def _end_block(self, tag: str) -> None:
        # A paragraph right inside a list item goes on in its line.
        if self._line.strip() == "-" and tag in ("p", "div"):
            return
        self._end_line()
        if tag in _SPACED and self._parts:
            self._parts.append("\n" if self._parts[-1].endswith("\n") else "\n\n")

    def _end_line(self) -> None:
        line, self._line = self._line.strip(), ""
        if line.strip("#-| "):
            self._parts.append(line + "\n")
