"""Where training prompts come from: maths questions, function stubs and documentation of installed packages."""

import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from draft_worker.train.chat_topics import chat_request

PACKAGES = (
    "django", "networkx", "numpy", "pandas", "scipy", "skimage", "sklearn", "sqlalchemy", "statsmodels", "sympy", "torch",
    "transformers", "xarray",
)  # fmt: skip
"""Beside the standard library, those of them that are installed. All permissively licensed."""

_PER_PACKAGE = 12000
"""Most pieces of one package: the large ones repeat themselves."""
_MAX_CHARS = 900
_LEAST_DOC = 40
"""Shorter documentation says nothing."""
_LEFT_OUT = {"test", "tests", "site-packages", "dist-packages"}
_MATHS = (
    "{}", "{}", "Solve this step by step. {}", "{} Explain your reasoning.", "Question: {}\nAnswer:",
    "Help me with this problem: {}", "{}\nLet's think step by step.",
)  # fmt: skip
_CODE = (
    "{}", "{}", "{}", "Complete the following Python function:\n\n{}", "Write the body of this function.\n\n{}",
    "Finish this code:\n```python\n{}\n```", "Implement this function in Python and explain it:\n\n{}",
)  # fmt: skip
_DOCS = (
    "{}", "Continue this text:\n\n{}", "Explain this in simple words:\n\n{}", "Summarize the following text.\n\n{}",
    "What does this describe?\n\n{}", "Give an example for this:\n\n{}", "Rewrite this for a beginner:\n\n{}",
)  # fmt: skip


def maths_prompts(file: Path, held_out: int, rng: random.Random) -> list[str]:
    """Each question of a file of JSON lines but the last `held_out` ones, once as it is and once in other words."""
    lines = [line for line in file.read_text("utf-8").splitlines() if line.strip()]
    questions = [json.loads(line)["question"] for line in lines[: max(0, len(lines) - held_out)]]
    return [rng.choice(_MATHS).format(question) for question in questions] + questions


def python_files(rng: random.Random) -> Iterator[Path]:
    """Source files of the standard library and of PACKAGES, each package's in random order, tests left out."""
    paths = sysconfig.get_paths()
    roots = [Path(paths["stdlib"])] + [Path(paths["purelib"]) / name for name in PACKAGES]
    for root in roots:
        names = [file.relative_to(root).parts for file in sorted(root.rglob("*.py"))]
        files = [root.joinpath(*parts) for parts in names if not _LEFT_OUT & set(parts)]
        rng.shuffle(files)
        yield from files


def package_of(file: Path) -> str:
    """Name of the package; the standard library is one."""
    return next((name for name in PACKAGES if name in file.parts), "")


def stubs_and_docs(rng: random.Random) -> tuple[list[str], list[str]]:
    """Function stubs with their docstrings, and openings of other documentation, no piece twice."""
    stubs: dict[str, list[str]] = {}
    docs: dict[str, list[str]] = {}
    for file in python_files(rng):
        name = package_of(file)
        if min(len(stubs.get(name, ())), len(docs.get(name, ()))) >= _PER_PACKAGE:
            continue
        found = _pieces(file)
        stubs.setdefault(name, []).extend(found[0])
        docs.setdefault(name, []).extend(found[1])
    return _unique(stubs), _unique(docs)


def _unique(pieces: dict[str, list[str]]) -> list[str]:
    return list(dict.fromkeys(piece for part in pieces.values() for piece in part[:_PER_PACKAGE]))


def _pieces(file: Path) -> tuple[list[str], list[str]]:
    """(stubs, openings) of one file; nothing of one that is not ASCII Python."""
    try:
        text = file.read_text("ascii")
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError):
        return [], []
    lines = text.splitlines()
    stubs, docs = [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            docs += _openings(ast.get_docstring(node))
        elif isinstance(node, ast.FunctionDef):
            doc = ast.get_docstring(node)
            if doc and len(doc) >= _LEAST_DOC:
                stubs += _stub(node, lines)
                docs += _openings(doc)[1:]
    return stubs, docs


def _stub(node: ast.FunctionDef, lines: list[str]) -> list[str]:
    """From `def` to the end of the docstring, moved to the left edge."""
    end = node.body[0].end_lineno or node.lineno
    part = lines[node.lineno - 1 : end]
    stub = "\n".join(line[node.col_offset :] if not line[: node.col_offset].strip() else line for line in part)
    return [stub + "\n"] if len(stub) <= _MAX_CHARS else []


def _openings(doc: str | None) -> list[str]:
    """The first paragraph, then a later one, of documentation that has something to say."""
    paragraphs = [part.strip() for part in (doc or "").split("\n\n")]
    good = [part for part in paragraphs if _LEAST_DOC <= len(part) <= _MAX_CHARS and ">>>" not in part]
    return good[:1] + good[-1:] if len(good) > 1 else good


def code_prompts(stubs: list[str], num: int, rng: random.Random) -> list[str]:
    """num of the stubs, asked for in several ways."""
    return [rng.choice(_CODE).format(stub) for stub in rng.sample(stubs, min(num, len(stubs)))]


def doc_prompts(docs: list[str], num: int, rng: random.Random) -> list[str]:
    """num of the openings, with a request around them."""
    return [rng.choice(_DOCS).format(doc) for doc in rng.sample(docs, min(num, len(docs)))]


def chat_prompts(num: int, rng: random.Random) -> list[str]:
    """num requests, no two the same."""
    found: dict[str, None] = {}
    for _ in range(20 * num):
        if len(found) >= num:
            break
        found[chat_request(rng)] = None
    return list(found)
