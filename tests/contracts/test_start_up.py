"""Help, the desk verbs and data preparation start without torch, whose import takes seconds; a desk question takes none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contracts.source_rules import ROOT

HEAVY = ("torch", "transformers", "accelerate")
WITHOUT_TORCH = ["muletrain.probe.box", "muletrain.data.prepare", "muletrain.data.tokenizer", "muletrain.launch.local"]
PROBE = """
import sys
{code}
print("loaded:", *(name for name in {heavy!r} if name in sys.modules), file=sys.stderr)
"""
RUN = """
sys.argv = ["mule", *{arguments!r}]
from muletrain.cli.app import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""


def heavy_modules(code: str, folder: Path) -> tuple[str, str]:
    """(what was loaded of HEAVY, what was printed) by code in a fresh interpreter."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COVERAGE")}
    command = [sys.executable, "-c", PROBE.format(code=code, heavy=HEAVY)]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stderr.split("loaded:")[-1].strip(), result.stdout


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_the_module_loads_without_torch(module: str, tmp_path: Path) -> None:
    assert heavy_modules(f"import {module}", tmp_path)[0] == ""


def verbs() -> list[list[str]]:
    """Every verb with its sub-verbs, as the application has them."""
    import typer

    from muletrain.cli.app import app

    root = typer.main.get_command(app)
    found: list[list[str]] = [[]]
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        found += [[name], *([name, inner] for inner in getattr(command, "commands", {}))]
    return found


@pytest.mark.parametrize("verb", verbs(), ids=" ".join)
def test_help_comes_without_torch(verb: list[str], tmp_path: Path) -> None:
    loaded, printed = heavy_modules(RUN.format(arguments=[*verb, "--help"]), tmp_path)
    assert loaded == ""
    assert "Usage: mule" in printed


@pytest.mark.parametrize("arguments", [["show"], ["show", "--plan"], ["validate"]], ids=" ".join)
def test_a_desk_verb_answers_without_torch(arguments: list[str]) -> None:
    verb, *options = arguments
    loaded, printed = heavy_modules(RUN.format(arguments=["config", verb, "recipes/demo.yaml", *options]), ROOT)
    assert loaded == ""
    assert printed
