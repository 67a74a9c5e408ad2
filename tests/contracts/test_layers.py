"""The layers of docs/ARCHITECTURE.md hold, every room is in them, and the desk verbs answer without torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.contracts.source_rules import ROOT, SOURCE

RULES = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]


def lint_imports(source: Path) -> subprocess.CompletedProcess[str]:
    """import-linter on a copy of the package, with this checkout's contracts."""
    command = [str(Path(sys.executable).parent / "lint-imports"), "--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    environment = os.environ | {"PYTHONPATH": str(source)}
    return subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)


def test_imports_keep_the_layers() -> None:
    result = lint_imports(SOURCE.parent)
    assert result.returncode == 0, result.stdout
    assert f"{len(RULES)} kept, 0 broken" in result.stdout


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("spec/units.py", "import torch", "no torch"),
        ("config/__init__.py", "import muletrain.models", "nothing of the engine wing"),
        ("metrics/__init__.py", "import muletrain.config", "nothing of the desk wing"),
        ("data/__init__.py", "import muletrain.optim", "Engine wing: imports point downwards"),
        ("catalog/__init__.py", "def f():\n    import muletrain.planner", "Desk wing: imports point downwards"),
    ],
)
def test_a_planted_import_breaks_its_contract(tmp_path: Path, file: str, line: str, broken: str) -> None:
    shutil.copytree(SOURCE, tmp_path / "muletrain", ignore=shutil.ignore_patterns("__pycache__"))
    planted = tmp_path / "muletrain" / file
    planted.write_text(f"{planted.read_text(encoding='utf-8')}\n{line}\n", encoding="utf-8")
    result = lint_imports(tmp_path)
    assert result.returncode != 0
    assert re.search(f"^.*{broken}.* BROKEN$", result.stdout, re.MULTILINE), result.stdout


def test_every_room_has_a_place() -> None:
    rooms = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    layered = {name for rule in RULES for layer in rule.get("layers", []) for name in re.findall(r"\w+", layer)}
    desk = {name.removeprefix("muletrain.") for name in _rule("desk-without-engine")["source_modules"]}
    engine = {name.removeprefix("muletrain.") for name in _rule("engine-without-desk")["source_modules"]}
    assert rooms <= layered
    assert rooms == (desk | engine | {"spec", "schedule", "cli"}) & rooms
    assert not desk & engine
    assert {path.name for path in SOURCE.glob("*.py")} == {"__init__.py", "__main__.py"}


def _rule(name: str) -> dict[str, list[str]]:
    return next(rule for rule in RULES if rule["id"] == name)
