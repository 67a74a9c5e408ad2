"""`mule bench scaling` on a real, tiny recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from muletrain.bench.scaling import ScalingTable
from muletrain.cli.app import app
from tests.cli.training import write_recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("bench"))


def test_scaling_measures_each_count_and_saves_the_table(recipe, tmp_path):
    out = tmp_path / "out"
    result = CliRunner().invoke(
        app, ["bench", "scaling", str(recipe), "--workers", "1,3", "--steps", "3", "--output", str(out)]
    )
    assert result.exit_code == 0, result.output
    table = ScalingTable.load(out / "scaling.json")
    assert [(row.workers, row.steps) for row in table.rows] == [(1, 3), (3, 3)]
    assert table.rows[0].communication_exposed is None
    assert 0 < table.rows[1].communication_exposed < 1 and table.rows[1].communication_overlapped is None
    assert "No speed-up is to be expected" in result.output and "not measured" in result.output
    assert (out / "scaling.md").read_text() in result.output
    assert not list(out.glob("workers-*/checkpoints")), "a benchmark leaves no model"
    again = CliRunner().invoke(app, ["bench", "scaling", "--runs", str(out / "workers-3"), "--json"])
    printed = json.loads(again.output)
    assert printed["schema_version"] == 1 and [row["workers"] for row in printed["rows"]] == [3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give a recipe to run, or --runs"),
        (["RECIPE", "--runs", "x"], "give a recipe to run, or --runs"),
        (["RECIPE", "--workers", "1,two"], "is no list of whole numbers"),
        (["RECIPE", "--workers", "0"], "is no list of whole numbers"),
    ],
)
def test_a_wrong_question_is_answered_with_the_right_one(recipe, arguments, words):
    words_typed = [str(recipe) if word == "RECIPE" else word for word in arguments]
    result = CliRunner().invoke(app, ["bench", "scaling", *words_typed])
    assert result.exit_code == 2
    assert words in result.output


def test_simulate_prints_a_table_or_json() -> None:
    options = ["bench", "simulate", "smollm2-135m", "--tokens", "512", "--sequence", "512"]
    shown = CliRunner().invoke(app, options)
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith("SIMULATED: smollm2-135m on RTX 4090") and "| 512 | 1 | bf16 | yes |" in shown.output
    content = json.loads(CliRunner().invoke(app, [*options, "--json", "--no-clip", "--moments", "8bit"]).stdout)
    assert (content["schema_version"], content["simulated"]) == (1, True)
    assert (content["points"][0]["moments"], content["points"][0]["clip"]) == ("8bit", False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cards", "1,x"], "--cards: '1,x' is no list of whole numbers; write it like 1,3"),
        (["--moments", "int4"], "--moments: 'int4' is not one of fp32, bf16, 8bit"),
        (["--gpu", "RTX 9999"], "is not in the GPU catalogue"),
    ],
)
def test_simulate_names_the_option_at_fault(options: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", "simulate", "smollm2-135m", *options])
    assert result.exit_code == 2 and said in result.output
