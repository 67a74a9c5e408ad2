"""Every test can fail, every test file holds tests, and the errors a user can meet are looked at by tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts.source_rules import ROOT, SOURCE, SourceFile, python_files
from tests.contracts.suite_rules import cannot_fail, untested_messages, without_tests

TESTS = python_files(ROOT / "tests")
ROOMS = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))


def test_every_test_file_holds_a_test() -> None:
    assert list(without_tests(TESTS)) == []


def test_every_test_can_fail() -> None:
    assert list(cannot_fail(TESTS)) == []


@pytest.mark.parametrize("room", ROOMS)
def test_every_error_message_is_looked_at_by_a_test(room: str) -> None:
    tests = [file for file in TESTS if "contracts" not in file.path.parts]
    assert untested_messages(python_files(SOURCE / room), tests) == []


def parsed(name: str, text: str) -> SourceFile:
    return SourceFile.parse(Path(name), text)


def test_a_file_without_tests_is_found() -> None:
    assert list(without_tests([parsed("test_a.py", "def check_a(): assert True\n")]))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def test_a():\n    print(1)\n", True),
        ("def test_a():\n    compare(1)\n", False),
        ("def test_a():\n    run_workers(2, _worker)\ndef _worker(rank):\n    assert rank\n", False),
        ("def test_a():\n    run_workers(2, _worker)\ndef _worker(rank):\n    return rank\n", True),
        ("def test_a():\n    with pytest.raises(ValueError):\n        f()\n", False),
        ("def test_a():\n    torch.testing.assert_close(1, 1)\n", False),
        ("def test_a():\n    test_a()\n", True),
    ],
)
def test_a_test_that_cannot_fail_is_found(text: str, found: bool) -> None:
    shared = parsed("shared.py", "def compare(x):\n    assert x\n\ndef run_workers(n, f):\n    assert n\n")
    assert bool(list(cannot_fail([parsed("test_a.py", text), shared]))) == found


@pytest.mark.parametrize(
    ("quoted", "found"),
    [
        ("is no known family", False),
        (r"model\.source: .* is no known family", False),
        ("the model's family mixes up", True),
        ("known", True),
    ],
)
def test_an_untested_message_is_found(quoted: str, found: bool) -> None:
    package = parsed("a.py", 'def f(name):\n    raise InputError(f"model.source: {name} is no known family; use llama")\n')
    assert bool(untested_messages([package], [parsed("test_a.py", f"x = {quoted!r}\n")])) == found
