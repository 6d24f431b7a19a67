"""Rules that hold for every file of the repository and that no linter knows."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("memsvc", "target_worker", "draft_worker", "tokenizer_proc", "launch")

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 40
MAX_PARAMETERS = 6
MAX_FILE_BYTES = 500_000
MAX_MODELS_BYTES = 32 << 20

# Exceptions to the size rules: "path" or "path::function" -> the reason.
EXCEPTIONS = {
    "draft_worker/shape.py::from_json": "one line for each key of a drafter's config.json",
    "memsvc/device/kernels/block_attention.py::_attend_chunks": "a GPU kernel that must not leave its registers",
    "memsvc/device/kernels/block_attention.py::block_attention": "the operands of attention: rows, pages, mask, sink",
}

_BINARY_SUFFIXES = {".safetensors", ".png", ".gz", ".xz"}
_PICKLE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
_PICKLE_NAMES = {"recv_pyobj", "send_pyobj", "load_module", "allow_pickle"}
_REGISTRY_HOSTS = re.compile(
    r"pypi\.(org|python)|python[h]osted|download\.pytorch|npm[j]s|crates\.io|(ghcr|docker|quay)\.io"
)
_MACHINE_PATHS = re.compile(r"(?<![\w.])/(work|root|home)/[^\s/]")
_UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")


@cache
def tracked_files() -> list[Path]:
    """Files under version control, and new ones that are not ignored."""
    # Any owner is safe to list files of: tests may run as another user than the one who cloned.
    command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return [path for name in sorted(set(listed.split("\0"))) if name and (path := ROOT / name).is_file()]


def text_files() -> Iterator[tuple[str, str]]:
    """(path, content) of everything that is text; models are data."""
    for path in tracked_files():
        name = str(path.relative_to(ROOT))
        if path.suffix not in _BINARY_SUFFIXES and not name.startswith("models/"):
            yield name, path.read_text("utf-8")


def sources(*tops: str) -> Iterator[tuple[str, str, ast.Module]]:
    """(path, content, syntax tree) of the Python files under the named folders."""
    for name, content in text_files():
        if name.endswith(".py") and name.split("/")[0] in tops:
            yield name, content, ast.parse(content)


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything a tree imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def unsafe_uses(tree: ast.Module) -> list[str]:
    """Ways in which bytes from outside could become code."""
    found = [name for name in imported(tree) if name.split(".")[0] in _PICKLE_MODULES]
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="load" | "save"):
                found.append(f"torch.{node.attr}")
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)) if name in _PICKLE_NAMES:
                found.append(name)
            case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
                found.append(f"{name}()")
    return found


def undocumented_fields(tree: ast.Module) -> list[str]:
    """Fields of dataclasses named ...Config or ...Options that no string follows."""
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.ClassDef) and node.name.endswith(("Config", "Options")) and node.decorator_list):
            continue
        for field, after in zip(node.body, [*node.body[1:], None], strict=True):
            described = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and not described:
                found.append(f"{node.name}.{ast.unparse(field.target)}")
    return found


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters a caller has to know, self and cls apart. None of a Triton kernel: it can take no struct."""
    if any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list):
        return 0
    names = [arg.arg for arg in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]]
    return len([name for name in names if name not in ("self", "cls")])


def test_nothing_unpickles_or_evaluates():
    tops = (*PACKAGES, "tests", "docs")
    assert [(name, uses) for name, _, tree in sources(*tops) if (uses := unsafe_uses(tree))] == []


def test_the_search_for_unsafe_uses_finds_them():
    source = (
        "import pickle\nfrom torch import nn\nfrom marshal import loads\nx = torch.load(p)\ns.recv_pyobj()\n"
        "np.load(p, allow_pickle=True)\neval(text)\nmodel.eval()\n"
    )
    expected = {"pickle", "marshal.loads", "torch.load", "recv_pyobj", "allow_pickle", "eval()"}
    assert set(unsafe_uses(ast.parse(source))) == expected


def test_text_is_ascii():
    assert [name for name, content in text_files() if not content.isascii()] == []


def test_no_registry_hosts_and_no_paths_of_one_machine():
    bad = [
        (name, number, line)
        for name, content in text_files()
        for number, line in enumerate(content.splitlines(), 1)
        if _REGISTRY_HOSTS.search(line) or _MACHINE_PATHS.search(line)
    ]
    assert bad == []


def test_the_search_for_paths_of_one_machine_finds_them():
    tops = ["work", "root", "home"]
    rests = ["somewhere/file", ".cache/model", "{name}", "*"]
    assert [path for top in tops for rest in rests if not _MACHINE_PATHS.search(path := f'"/{top}/{rest}"')] == []
    assert [path for path in ("net/work/file", "../home/x", "/homes/x") if _MACHINE_PATHS.search(path)] == []


def test_nothing_is_left_for_later():
    assert [name for name, content in text_files() if _UNFINISHED.search(content)] == []


def test_no_file_is_named_for_holding_this_and_that():
    assert [path for path in tracked_files() if path.stem in ("utils", "util", "helpers", "misc", "common")] == []


def oversized() -> dict[str, str]:
    """ "path" or "path::function" -> what is too much about it."""
    found = {}
    for name, content, tree in sources(*PACKAGES):
        num_lines = len(content.splitlines())
        if num_lines > MAX_FILE_LINES:
            found[name] = f"{num_lines} lines"
        for function in functions(tree):
            num_lines = (function.end_lineno or 0) - function.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                found[f"{name}::{function.name}"] = f"{num_lines} lines"
            if num_parameters(function) > MAX_PARAMETERS:
                found[f"{name}::{function.name}"] = f"{num_parameters(function)} parameters"
    return found


def test_files_and_functions_are_short_but_for_the_exceptions_listed():
    found = oversized()
    assert {name: size for name, size in found.items() if name not in EXCEPTIONS} == {}
    assert [name for name in EXCEPTIONS if name not in found] == []


def test_every_config_field_is_described():
    tops = (*PACKAGES, "tests")
    assert [(name, fields) for name, _, tree in sources(*tops) if (fields := undocumented_fields(tree))] == []


def test_the_search_for_undescribed_fields_finds_them():
    source = '@dataclass\nclass AConfig:\n    a: int\n    """said"""\n    b: int = 2\n\nclass Other:\n    c: int\n'
    assert undocumented_fields(ast.parse(source)) == ["AConfig.b"]


def test_every_module_says_what_it_is():
    silent = [name for name, content, tree in sources(*PACKAGES) if content.strip() and not ast.get_docstring(tree)]
    assert silent == []


def test_unit_tests_of_the_memory_service_need_no_torch():
    needy = [
        name
        for name, _, tree in sources("tests")
        if name.startswith("tests/unit/memsvc/") and any(n.split(".")[0] == "torch" for n in imported(tree))
    ]
    assert needy == []


def test_repository_holds_no_large_files():
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in tracked_files()}
    models = {name: size for name, size in sizes.items() if name.startswith("models/")}
    assert {n: s for n, s in sizes.items() if s > MAX_FILE_BYTES and n not in models} == {}
    assert sum(models.values()) <= MAX_MODELS_BYTES
