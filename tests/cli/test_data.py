"""`mule data` as a user meets it: whole commands in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from muletrain.data.dataset import open_prepared

TEXT = "The mule carries 12 loads, 你好, over the pass.\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text files, rows with faults, and a tokenizer trained on them."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "texts").mkdir()
    for number in range(30):
        (folder / "texts" / f"{number:02d}.txt").write_text(f"{number}: " + TEXT * (1 + number % 5), encoding="utf-8")
    (folder / "rows.jsonl").write_text('{"text": "one row"}\nbroken\n{"text": ""}\n{"text": "another"}\n', encoding="utf-8")
    done = mule(folder, "data", "tokenizer", "texts", "rows.jsonl", "--vocab-size", "300", "--out", "tok")
    assert done.returncode == 0, done.stderr
    assert "300 tokens" in done.stdout and "1 rows could not be read" in done.stderr
    return folder


def mule(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = "from muletrain.cli.app import main; import sys; sys.argv[0] = 'mule'; sys.exit(main())"
    variables = os.environ | {"MULETRAIN_CACHE": str(folder / "cache")} | environment
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )


def test_D01_prepare_names_what_it_left_out(folder: Path) -> None:
    done = mule(folder, "data", "prepare", "texts", "rows.jsonl", "--tokenizer", "tok", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert "34 rows read" in done.stdout and "rows.jsonl:2: not valid JSON" in done.stdout and "empty: 1" in done.stdout
    assert open_prepared(folder / "out").manifest.rejected == 1
    stopped = mule(folder, "data", "prepare", "rows.jsonl", "--tokenizer", "tok", "--bad-rows", "stop")
    assert stopped.returncode == 2 and "rows.jsonl:2" in stopped.stderr and "Traceback" not in stopped.stderr


def test_prepare_in_the_cache_and_as_json(folder: Path) -> None:
    arguments = ("texts", "--tokenizer", "tok", "--validation-fraction", "0.3", "--processes", "2", "--json")
    value = json.loads(mule(folder, "data", "prepare", *arguments).stdout)
    assert value["schema_version"] == 2 and value["folder"].startswith(str(folder / "cache"))
    assert value["train"]["documents"] + value["validation"]["documents"] == 30 and value["validation"]["documents"] > 0


def test_inspect_a_data_set_for_a_length_and_a_packing(folder: Path) -> None:
    assert mule(folder, "data", "prepare", "texts", "--tokenizer", "tok", "--out", "seen").returncode == 0
    fills = {}
    for packing in ("best_fit", "concat", "none"):
        arguments = ("--sequence-length", "256", "--packing", packing, "--json", "--documents", "1")
        value = json.loads(mule(folder, "data", "inspect", "seen", *arguments).stdout)
        assert value["packing"]["sequence_length"] == 256 and value["packing"]["kind"] == packing
        assert "你好" in value["first_documents"][0] and value["first_documents"][0].startswith("<s>")
        fills[packing] = value["packing"]["fill"]
    assert 0 < fills["none"] < fills["best_fit"] <= fills["concat"] <= 1
    shown = mule(folder, "data", "inspect", "seen", "--sequence-length", "1k").stdout
    assert "packing best_fit at 1,024" in shown and "--- document 1" in shown


def test_D04_inspect_shows_text_on_any_console(folder: Path) -> None:
    plain = {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    done = mule(folder, "data", "inspect", "texts", "--tokenizer", "tok", **plain)
    assert done.returncode == 0 and "\\u4f60\\u597d" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "texts"), "name a tokenizer with --tokenizer"),
        (("inspect", "texts", "a=b"), "changes go with a recipe"),
        (("inspect", "texts", "--tokenizer", "tok", "--sequence-length", "many"), "--sequence-length"),
        (("inspect", "texts", "--tokenizer", "tok", "--sequence-length", "0"), "at least 1"),
        (("prepare", "nothing-here", "--tokenizer", "tok"), "nothing-here"),
        (("prepare", "texts", "--tokenizer", "./nowhere"), "data.tokenizer"),
    ],
)
def test_mistakes_are_told_with_exit_code_2(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    done = mule(folder, "data", *arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_inspect_with_another_tokenizer_is_refused(folder: Path) -> None:
    assert mule(folder, "data", "tokenizer", "texts", "--vocab-size", "270", "--out", "small").returncode == 0
    assert mule(folder, "data", "prepare", "texts", "--tokenizer", "tok", "--out", "by_tok").returncode == 0
    done = mule(folder, "data", "inspect", "by_tok", "--tokenizer", "small")
    assert done.returncode == 2 and "not the one" in done.stderr


def test_inspect_a_recipe_with_its_packing_and_changes(folder: Path) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "demo.yaml"
    changes = ("data.tokenizer=tok", "data.source=texts", "data.sequence_length=128", "data.packing=concat")
    done = mule(folder, "data", "inspect", str(recipe), *changes, "--json")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert (value["packing"]["kind"], value["packing"]["sequence_length"], value["rows"]) == ("concat", 128, 30)
