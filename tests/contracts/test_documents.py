"""What the documents tell a reader to type is typed here, in a copy of the project, in the order of the page.

A fenced block marked `sh` is run; one marked `sh no-run` holds what makes the environment or takes minutes, and of it only
the make targets are looked up. A block marked `yaml NAME` is a file that the reader writes. A translation has the same blocks
as its original but for the comments, so they are run once.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contracts.source_rules import ROOT, SOURCE

FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DOCUMENTS = [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LIMIT_S = 280


def blocks(path: Path) -> list[tuple[str, str, str]]:
    """(language, words after it, text) of each fenced block with a language."""
    return [(language, rest.strip(), text) for language, rest, text in FENCE.findall(path.read_text(encoding="utf-8"))]


def runnable(path: Path) -> list[tuple[str, str, str]]:
    """The blocks that are run, and the files that they need."""
    return [
        (language, rest, text)
        for language, rest, text in blocks(path)
        if (language, bool(rest)) in (("sh", False), ("yaml", True))
    ]


def without_comments(text: str) -> str:
    return re.sub(r"[ ]*#.*$", "", text, flags=re.MULTILINE)


def test_the_translation_has_the_same_blocks() -> None:
    original, translation = (
        [(language, rest, without_comments(text)) for language, rest, text in blocks(ROOT / name)]
        for name in ("README.md", "README.zh.md")
    )
    assert translation == original
    assert len(runnable(ROOT / "README.md")) >= 5


def script(path: Path) -> str:
    """The page's runnable blocks as one shell script."""
    lines = ["set -euo pipefail"]
    for language, rest, text in runnable(path):
        lines.append(f"cat > {rest} <<'EOF'\n{text}EOF" if language == "yaml" else text)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if path.name != "README.zh.md" and runnable(path)], ids=lambda p: p.name
)
def test_the_commands_of_the_page_run(path: Path, tmp_path: Path) -> None:
    for name in ("src", "recipes"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    tools = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "MULETRAIN_CACHE": str(tmp_path / "cache")}
    result = subprocess.run(
        ["bash", "-c", script(path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_the_make_targets_and_links_of_the_page_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {name for _, _, block in blocks(path) for name in re.findall(r"^make (\w+)", block, re.MULTILINE)}
    named |= set(re.findall(r"`make (\w+)`", text))
    assert named <= targets
    links = {link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link}
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_rooms_and_files_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`([\w/]+/[\w]*\.(?:py|yaml))`", text))
    assert len(files) > 10
    assert [name for name in sorted(files) if not any((base / name).exists() for base in (SOURCE, ROOT))] == []
    described = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert described == {path.parent.name for path in SOURCE.glob("*/__init__.py")}
