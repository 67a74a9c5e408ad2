"""Rules on the tests themselves: each can fail, and each error a user can meet is looked at by one.

A test that asserts nothing passes whatever the code does. An assertion may sit in a function of the same file, or of another
test file, that the test names; the one in run_workers does not count, as it only says that the workers came back.
An error message counts as tested when a piece of its fixed text stands in a string of a test. That is cheap and static; what it
cannot see is a test that quotes a message and never provokes it, which is no mistake that anybody makes in good faith.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.contracts.source_rules import FUNCTIONS, SourceFile

ERRORS = {"InputError", "DoesNotFitError", "WorkerFailedError", "StoppedError", "NonFiniteError"}
MIN_PIECE = 10
"""Characters of fixed text that a message and a test must have in common."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def tests_in(file: SourceFile) -> list[Function]:
    """The functions that pytest collects from a file."""
    classes = [node for node in file.tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test")]
    found = [node for body in (file.tree, *classes) for node in body.body if isinstance(node, FUNCTIONS)]
    return [node for node in found if node.name.startswith("test_")]


def without_tests(files: list[SourceFile]) -> Iterator[str]:
    """Test files from which nothing is collected."""
    for file in files:
        if file.path.name.startswith("test_") and not tests_in(file):
            yield f"{file.path.name}: holds no test"


def cannot_fail(files: list[SourceFile]) -> Iterator[str]:
    """Tests in which nothing is asserted, neither in their body nor in the functions they name."""
    shared = {node.name: node for file in files if not file.path.name.startswith("test_") for node in _functions(file)}
    shared.pop("run_workers", None)
    for file in files:
        own = shared | {node.name: node for node in _functions(file)}
        for test in tests_in(file):
            if not _asserts(test, own, set()):
                yield f"{file.path.name}:{test.lineno}: {test.name} asserts nothing"


def _functions(file: SourceFile) -> list[Function]:
    return [node for node in ast.walk(file.tree) if isinstance(node, FUNCTIONS)]


def _asserts(function: Function, known: dict[str, Function], seen: set[str]) -> bool:
    seen.add(function.name)
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, (ast.Name, ast.Attribute)):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in ("raises", "warns", "fail") or name.startswith("assert_"):
                return True
            if name in known and name not in seen and _asserts(known[name], known, seen):
                return True
    return False


def messages(files: list[SourceFile]) -> Iterator[tuple[str, list[str]]]:
    """(file:line: message, pieces of fixed text) of each error for users whose text stands where it is raised."""
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS:
                for argument in node.args:
                    pieces = [piece for piece in _pieces(argument) if len(piece) >= MIN_PIECE]
                    if pieces:
                        yield f"{file.path.name}:{node.lineno}: {'…'.join(pieces)}", pieces


def _pieces(node: ast.AST) -> list[str]:
    """Fixed text of a string or f-string, the values in it left out."""
    inner = [child for part in ast.walk(node) if isinstance(part, ast.FormattedValue) for child in ast.walk(part)]
    return [
        part.value.strip()
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and part not in inner
    ]


def untested_messages(package: list[SourceFile], tests: list[SourceFile]) -> list[str]:
    """Messages of which no test quotes a piece."""
    quoted: set[str] = set()
    for file in tests:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                quoted.update(piece.strip() for piece in re.split(r"\.[*+]|\\?\n", re.sub(r"\\([^\w\s])", r"\1", node.value)))
    quoted = {piece for piece in quoted if len(piece) >= MIN_PIECE}
    return [
        message
        for message, pieces in messages(package)
        if not any(piece in quote or quote in piece for piece in pieces for quote in quoted)
    ]
