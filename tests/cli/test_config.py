"""mule config: show, validate, schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from muletrain.cli.app import app
from muletrain.config.load import load_recipe
from muletrain.spec.plan import Plan
from muletrain.spec.recipe import RunConfig

RECIPE = """
run_dir: r
model: {source: smollm2-135m, overrides: {num_hidden_layers: 2, hidden_act: "silu"}}
data: {source: [d, e]}
train: {steps: 10, optimizer: {learning_rate: 1e-5}}
precision: {compute: fp32}
memory: {gpu_limit: 24GiB}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def mule(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_show_is_the_whole_recipe_again(recipe: Path) -> None:
    shown = mule("config", "show", recipe, "train.seed=4", "data.source=[x]")
    assert shown.exit_code == 0
    again = recipe.with_name("again.yaml")
    again.write_text(shown.stdout)
    assert load_recipe(again) == load_recipe(recipe, ["train.seed=4", "data.source=[x]"])
    assert list(yaml.safe_load(shown.stdout)) == list(RunConfig.model_fields)
    assert "beta2: 0.95" in shown.stdout and "gpu_limit: 25769803776" in shown.stdout


def test_show_json(recipe: Path) -> None:
    shown = json.loads(mule("config", "show", recipe, "--json").stdout)
    assert shown["schema_version"] == 1
    assert RunConfig.model_validate(shown["recipe"]) == load_recipe(recipe)


def test_show_plan_for_this_box(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shown = mule("config", "show", recipe, "--plan", "train.tokens_per_step=8192")
    assert shown.exit_code == 0
    tree = yaml.safe_load(shown.stdout)
    assert (tree["train"]["micro_batches"], tree["parallel"]["workers"], tree["parallel"]["device"]) == (4, 1, "cpu")
    assert "streaming" not in tree["memory"], "it is resident"
    assert "#   parallel.device = cpu: no NVIDIA GPU is visible\n" in shown.stdout
    assert "#   host  moments" in shown.stdout and "of the whole box" in shown.stdout
    plan = Plan.from_json(mule("config", "show", recipe, "--plan", "--json", "train.tokens_per_step=8192").stdout)
    assert plan.train.micro_batches == 4 and plan.schema_version == 1


def test_what_does_not_fit_ends_with_3(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shown = mule("config", "show", recipe, "--plan", "memory.host_limit=1MiB")
    assert (shown.exit_code, shown.stdout) == (3, "")
    assert "does not fit" in shown.stderr


def test_validate(recipe: Path) -> None:
    assert mule("config", "validate", recipe).stdout == f"{recipe}: sound\n"
    wrong = mule("config", "validate", recipe, "train.stps=1", "train.steps=x")
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith(
        "mule: 2 problems\n  argument 'train.stps=1': train.stps: there is no such key; did you mean train.steps?"
    )


def test_validate_json(recipe: Path) -> None:
    assert json.loads(mule("config", "validate", recipe, "--json").stdout) == {
        "schema_version": 1,
        "valid": True,
        "problems": [],
    }
    wrong = mule("config", "validate", recipe, "--json", "train.steps=x")
    assert wrong.exit_code == 2
    assert json.loads(wrong.stdout)["problems"] == [
        "argument 'train.steps=x': train.steps: 'x' is not a count; write it like 4096 or 64k"
    ]


def test_schema() -> None:
    schema = json.loads(mule("config", "schema").stdout)
    assert schema["properties"].keys() == RunConfig.model_fields.keys()
