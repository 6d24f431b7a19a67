"""The sources of the corpus: what is read of which package, under which licence. All of them permissive."""

import gzip
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from target_worker.train.documents import parts_at
from target_worker.train.html_text import html_to_text
from target_worker.train.man_text import man_to_text
from target_worker.train.packages import Debian, Package, StandardLibrary, Wheel

Texts = Iterator[tuple[str, str]]
"""Name and raw text, one by one."""

_LEFT_OUT = {
    "test", "tests", "testing", "_vendor", "vendor", "site-packages", "dist-packages", "pydoc_data", "encodings",
    "idle_test", "__pycache__",
}  # fmt: skip
_INDEX_PAGES = re.compile(r"^(genindex|py-modindex|search|contents|bookindex|legalnotice)")
_SCENES = re.compile(r"^(?=(?:ACT|SCENE|PROLOGUE|EPILOGUE)\b|\d{1,3}$)", re.M)
_SYNSETS = 64
"""Of the dictionary, in one document: about 6 KB."""
_KINDS = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Some texts of one licence."""

    name: str
    licence: str
    """SPDX identifier where there is one."""
    package: Package
    read: Callable[[Path], Texts]
    """The texts in the package's files, in the same order each time."""


def read_python(root: Path) -> Texts:
    """Python files, tests and bundled packages left out."""
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        if not _LEFT_OUT & set(parts) and not file.name.startswith("test_"):
            yield "/".join(parts), file.read_text("utf-8", errors="replace")


def read_restructured_text(root: Path) -> Texts:
    """Manual sources as their authors wrote them."""
    for file in sorted(root.rglob("_sources/**/*.rst.txt")):
        yield file.name.removesuffix(".rst.txt"), file.read_text("utf-8", errors="replace")


def read_html(root: Path) -> Texts:
    """Pages of a manual."""
    for file in sorted(root.rglob("*.html")):
        if not file.is_symlink() and not _INDEX_PAGES.match(file.name):
            yield str(file.relative_to(root)), html_to_text(file.read_text("utf-8", errors="replace"))


def read_man_pages(root: Path) -> Texts:
    """Pages of the system's manual."""
    for file in sorted(root.rglob("man*/*.gz")):
        if not file.is_symlink():
            yield (
                file.name.removesuffix(".gz"),
                man_to_text(gzip.decompress(file.read_bytes()).decode("utf-8", "replace")),
            )


def read_wordnet(root: Path) -> Texts:
    """Definitions with their words, those that lie side by side in the dictionary together."""
    files = [(file, kind) for suffix, kind in _KINDS.items() for file in sorted(root.rglob(f"data.{suffix}"))]
    for file, kind in files:
        # Licence lines begin with a blank.
        lines = [line for line in file.read_text("utf-8").split("\n") if line and not line.startswith(" ")]
        entries = [_definition(line, kind) for line in lines]
        for start in range(0, len(entries), _SYNSETS):
            yield f"{kind}-{start}", "\n".join(entries[start : start + _SYNSETS])


def read_shakespeare(root: Path) -> Texts:
    """Scenes and sonnets."""
    for file in sorted(root.rglob("shakespeare.txt")):
        for number, part in enumerate(parts_at(file.read_text("utf-8"), _SCENES)):
            yield f"part-{number}", part


def _definition(line: str, kind: str) -> str:
    """An entry of WordNet's data files: offset, file, type, a hexadecimal number of words, each with an id, links | gloss."""
    head, _, gloss = line.partition(" | ")
    fields = head.split(" ")
    words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
    shown = ", ".join(re.sub(r"\((a|p|ip)\)$", "", word).replace("_", " ") for word in words)
    return f"{shown} ({kind}): {gloss.strip()}"


SOURCES = (
    Source(name="python-doc", licence="PSF-2.0", package=Debian(name="python3.11-doc"), read=read_restructured_text),
    Source(
        name="freebsd-man",
        licence="BSD-2-Clause AND BSD-4-Clause",
        package=Debian(name="freebsd-manpages"),
        read=read_man_pages,
    ),
    Source(name="postgresql-doc", licence="PostgreSQL", package=Debian(name="postgresql-doc-15"), read=read_html),
    Source(name="django-doc", licence="BSD-3-Clause", package=Debian(name="python-django-doc"), read=read_html),
    Source(name="wordnet", licence="WordNet 3.0", package=Debian(name="wordnet-base"), read=read_wordnet),
    Source(
        name="shakespeare",
        licence="public domain",
        package=Wheel(name="aiperf", version="0.13.0"),
        read=read_shakespeare,
    ),
    Source(name="python", licence="PSF-2.0", package=StandardLibrary(), read=read_python),
    Source(name="numpy", licence="BSD-3-Clause", package=Wheel(name="numpy"), read=read_python),
    Source(name="networkx", licence="BSD-3-Clause", package=Wheel(name="networkx"), read=read_python),
    Source(name="sympy", licence="BSD-3-Clause", package=Wheel(name="sympy"), read=read_python),
    Source(name="torch", licence="BSD-3-Clause", package=Wheel(name="torch"), read=read_python),
)
