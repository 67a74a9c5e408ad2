"""Rules on source text that import-linter, ruff and mypy do not have. Each takes a parsed file and gives faults as "line: why".

They read the syntax tree and run nothing, so the whole package is checked in a second and a fault is shown where it is written.
A call at module level may only build a value: a list of allowed names is stricter than a list of forbidden ones, and says what
is meant. Rejected: a run of the package under a tracer, which sees only the paths that happen to run.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "muletrain"
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
VAGUE_NAMES = ("utils", "util", "helpers", "helper", "misc", "common")
ENVIRONMENT_FILE = SOURCE / "config" / "environment.py"
VALUE_CALLS = {
    *("dict", "frozenset", "list", "set", "tuple", "range", "sorted", "zip", "enumerate", "reversed"),
    *("bool", "float", "int", "str", "len", "max", "min", "sum", "repr"),
    *("encode", "format", "items", "join", "keys", "lower", "split", "strip", "upper", "values", "with_name", "joinpath"),
    *("compile", "getLogger", "field", "namedtuple", "type", "get_args"),
    *("add_constructor", "add_representer", "add_typer", "callback", "command"),
}
"""Names whose call only builds or registers a value of its own module. So does a call of a class (a name in capitals)."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class SourceFile:
    """One Python file, parsed."""

    path: Path
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, path: Path, text: str) -> SourceFile:
        """Raises SyntaxError for what is not Python."""
        return cls(path, text, ast.parse(text, str(path)))


def python_files(folder: Path) -> list[SourceFile]:
    """All Python files under a folder, in order."""
    return [SourceFile.parse(path, path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))]


def too_long_file(file: SourceFile) -> Iterator[str]:
    """A file that should be two."""
    lines = len(file.text.splitlines())
    if lines > MAX_FILE_LINES:
        yield f"{lines}: the file has {lines} lines, {MAX_FILE_LINES} are allowed"


def too_long_function(file: SourceFile) -> Iterator[str]:
    """A function that does too much, decorators and docstring included."""
    for node in ast.walk(file.tree):
        if isinstance(node, FUNCTIONS):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{node.lineno}: {node.name} has {lines} lines, {MAX_FUNCTION_LINES} are allowed"


def vague_name(file: SourceFile) -> Iterator[str]:
    """A file name that says nothing, so that anything ends in it."""
    if file.path.stem.lower().strip("_").split("_")[0] in VAGUE_NAMES or file.path.stem.lower().split("_")[-1] in VAGUE_NAMES:
        yield f"1: {file.path.name} does not say what is in it"


def no_docstring(file: SourceFile) -> Iterator[str]:
    """A module that does not open with what it is."""
    if not ast.get_docstring(file.tree):
        yield "1: the module has no docstring"


def effect_at_import(file: SourceFile) -> Iterator[str]:
    """A statement at module or class level that does more than define something."""
    yield from _effects(file.tree.body)


def _effects(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _effects(node.body)
        elif isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING":
            yield from _effects(node.body + node.orelse)
        elif isinstance(node, (ast.Import, ast.ImportFrom, ast.Pass, *FUNCTIONS)) or _is_text(node) or _is_main(node):
            continue
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.Assert, ast.Expr)):
            yield from _effectful_calls(node)
        else:
            yield f"{node.lineno}: a {type(node).__name__.lower()} statement runs at import"


def _effectful_calls(node: ast.stmt) -> Iterator[str]:
    calls = list(_calls_now(node))
    if isinstance(node, ast.Expr) and not calls:
        yield f"{node.lineno}: an expression without a use"
    for call in calls:
        name = _name(call.func) or (_name(call.func.func) if isinstance(call.func, ast.Call) else "")
        if name not in VALUE_CALLS and not name.lstrip("_")[:1].isupper():
            yield f"{call.lineno}: {ast.unparse(call.func)}() is called at import"


def _calls_now(node: ast.AST) -> Iterator[ast.Call]:
    """Calls that run with the statement: those in a lambda run later."""
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.Call):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _calls_now(child)


def _is_text(node: ast.stmt) -> bool:
    """A docstring or an ellipsis."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def _name(node: ast.AST) -> str:
    """The last part of a dotted name, or an empty string."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def environment_read(file: SourceFile) -> Iterator[str]:
    """An environment variable used outside the one file that may: elsewhere nobody would find it."""
    if file.path == ENVIRONMENT_FILE:
        return
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    for node in ast.walk(file.tree):
        from_os = isinstance(node, ast.ImportFrom) and node.module == "os" and names & {alias.name for alias in node.names}
        if from_os or (isinstance(node, ast.Attribute) and node.attr in names and _name(node.value) == "os"):
            yield f"{node.lineno}: the environment is used outside config/environment.py"


def swallowed_error(file: SourceFile) -> Iterator[str]:
    """An error caught without a type, or caught and dropped without a word. Going on to the next item needs an exact type."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield f"{node.lineno}: except without a type"
                continue
            dropping = (ast.Pass, ast.Continue) if _name(node.type) in ("Exception", "BaseException") else ast.Pass
            if all(isinstance(child, dropping) or _is_text(child) for child in node.body):
                yield f"{node.lineno}: the error is dropped; use contextlib.suppress with the exact type, or act on it"


def unfinished(file: SourceFile) -> Iterator[str]:
    """A stub, or a note that something is left to do."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Name) and node.id in ("NotImplementedError", "NotImplemented"):
            yield f"{node.lineno}: {node.id}"
    for token in tokenize.generate_tokens(io.StringIO(file.text).readline):
        if token.type == tokenize.COMMENT and any(word in token.string for word in ("TODO", "FIXME", "XXX", "HACK")):
            yield f"{token.start[0]}: {token.string}"


def faults(rule: object, files: list[SourceFile]) -> list[str]:
    """A rule over many files: "path:line: why"."""
    assert callable(rule)
    return [f"{file.path.relative_to(ROOT)}:{fault}" for file in files for fault in rule(file)]
