"""The package keeps the source rules, and each rule finds the fault it is there for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contracts import source_rules as rules
from tests.contracts.source_rules import ROOT, SOURCE, SourceFile

Rule = Callable[[SourceFile], Iterator[str]]

PACKAGE_RULES: list[Rule] = [
    rules.too_long_file,
    rules.too_long_function,
    rules.vague_name,
    rules.no_docstring,
    rules.effect_at_import,
    rules.environment_read,
    rules.swallowed_error,
    rules.unfinished,
]
TEST_RULES: list[Rule] = [rules.too_long_file, rules.vague_name, rules.swallowed_error]


@pytest.mark.parametrize("rule", PACKAGE_RULES)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    files = rules.python_files(SOURCE)
    assert len(files) > 20
    assert rules.faults(rule, files) == []


@pytest.mark.parametrize("rule", TEST_RULES)
def test_the_tests_keep_the_rule(rule: Rule) -> None:
    assert rules.faults(rule, rules.python_files(ROOT / "tests")) == []


PLANTED: list[tuple[Rule, str, str]] = [
    (rules.too_long_file, "a.py", "x = 1\n" * 401),
    (rules.too_long_function, "a.py", "def f():\n" + "    x = 1\n" * 60),
    (rules.vague_name, "utils.py", ""),
    (rules.vague_name, "data_helpers.py", ""),
    (rules.no_docstring, "a.py", "x = 1\n"),
    (rules.effect_at_import, "a.py", "import torch\ntorch.manual_seed(0)\n"),
    (rules.effect_at_import, "a.py", "print('hello')\n"),
    (rules.effect_at_import, "a.py", "SIZES = load('sizes')\n"),
    (rules.effect_at_import, "a.py", "class A:\n    rows = read()\n"),
    (rules.effect_at_import, "a.py", "for name in ('a', 'b'):\n    globals()[name] = 1\n"),
    (rules.effect_at_import, "a.py", "if True:\n    x = 1\n"),
    (rules.environment_read, "a.py", "import os\nx = lambda: os.environ['HOME']\n"),
    (rules.environment_read, "a.py", "import os\ndef f():\n    return os.getenv('HOME')\n"),
    (rules.environment_read, "a.py", "from os import environ\n"),
    (rules.swallowed_error, "a.py", "try:\n    f()\nexcept:\n    g()\n"),
    (rules.swallowed_error, "a.py", "try:\n    f()\nexcept Exception:\n    pass\n"),
    (rules.swallowed_error, "a.py", "try:\n    f()\nexcept ValueError:\n    pass\n"),
    (rules.swallowed_error, "a.py", "for x in y:\n    try:\n        f()\n    except Exception:\n        continue\n"),
    (rules.unfinished, "a.py", "def f():\n    raise NotImplementedError\n"),
    (rules.unfinished, "a.py", "x = 1  # TO" + "DO: two\n"),
]


@pytest.mark.parametrize(("rule", "name", "text"), PLANTED)
def test_the_rule_finds_a_planted_fault(rule: Rule, name: str, text: str) -> None:
    assert list(rule(SourceFile.parse(ROOT / name, text)))


GOOD = '''"""What this is."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PATTERN = re.compile("a+")
NAMES = frozenset({"a"}) | {word.strip for word in "a b".split()}
LATER = lambda: open("file")


@dataclass(frozen=True)
class Pair:
    """Two."""

    left: int
    right: list[int] = field(default_factory=list)


def first(path: str) -> int:
    """One."""
    try:
        return len(os.listdir(path))
    except FileNotFoundError:
        return 0


if __name__ == "__main__":
    print(first("."))
'''


@pytest.mark.parametrize("rule", PACKAGE_RULES)
def test_the_rule_leaves_good_code_alone(rule: Rule) -> None:
    assert list(rule(SourceFile.parse(Path("src/muletrain/spec/pair.py"), GOOD))) == []
