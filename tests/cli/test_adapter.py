"""An adapter run as a user has it: trained, continued elsewhere, used, merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from muletrain.cli.app import app
from muletrain.cli.train import train
from muletrain.config.load import load_recipe
from muletrain.serve.export import export
from muletrain.serve.generate import Generator, Request, find_model_folder
from muletrain.spec.errors import EXIT_DONE, EXIT_INPUT, EXIT_STOPPED, InputError
from muletrain.spec.plan import Plan
from tests.cli.training import write_recipe

LORA = ("model.weights=pretrained", "model.adapter.kind=lora", "model.adapter.rank=2", "model.adapter.dropout=0.1")
FAST = "train.optimizer.learning_rate=3e-2"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def run(recipe: Path) -> Path:
    """Three steps on two workers with zero3, three more streamed on one."""
    folder = recipe.parent / "lora"
    changes = [f"run_dir={json.dumps(str(folder))}", "log.console=quiet", FAST, *LORA]
    assert train(load_recipe(recipe, changes), stop_after=3) == EXIT_STOPPED
    assert train(load_recipe(recipe, [*changes, "memory.strategy=streamed", "parallel.workers=1"])) == EXIT_DONE
    return folder


def _losses(folder: Path) -> list[float]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["kind"] == "step"]


def test_resuming_under_another_strategy_and_number_of_workers_is_exact(run: Path, recipe: Path, tmp_path: Path) -> None:
    """The checkpoint holds the adapter alone, and the losses are those of a run that never stopped."""
    whole = tmp_path / "whole"
    changes = [f"run_dir={json.dumps(str(whole))}", "log.console=quiet", FAST, *LORA, "memory.strategy=resident"]
    assert train(load_recipe(recipe, [*changes, "parallel.workers=1"])) == EXIT_DONE
    assert _losses(run) == pytest.approx(_losses(whole), rel=1e-5)
    adapter = Plan.load(run / "plan.json").model.adapter
    saved = FileSystemReader(run / "checkpoints" / "step-00000006" / "state").read_metadata().state_dict_metadata
    assert sum(entry.size.numel() for entry in saved.values()) == 3 * adapter.parameters


def test_a_rank_or_kind_that_the_checkpoint_does_not_have_is_refused(run: Path, recipe: Path) -> None:
    for change in ("model.adapter.rank=3", "model.adapter.kind=none"):
        changes = [f"run_dir={json.dumps(str(run))}", "log.console=quiet", "train.steps=8", *LORA[:2], change]
        with pytest.raises(InputError, match="holds another model than the recipe asks for"):
            train(load_recipe(recipe, changes))


def test_generate_takes_an_adapter_run_and_export_merges_it(run: Path, recipe: Path, tmp_path: Path) -> None:
    folder = find_model_folder(run, print)
    request = Request("row 3 the mules", max_tokens=20)
    text = Generator(folder).complete(request).text
    result = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "merged")])
    assert result.exit_code == EXIT_DONE and "merged into" in result.stdout and "float32" in result.stdout
    assert Generator(tmp_path / "merged").complete(request).text == text
    base = recipe.parent / "model"
    assert Generator(base).complete(request).text != text
    ids = torch.arange(30)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
        torch.testing.assert_close(merged, Generator(folder)._model(ids).logits, rtol=1e-4, atol=1e-4)
    again = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "merged")])
    assert again.exit_code == EXIT_INPUT and "exists and is not empty" in again.output


def test_export_copies_a_whole_model(recipe: Path, tmp_path: Path) -> None:
    base = recipe.parent / "model"
    assert "copied" in export(base, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == sorted(path.name for path in base.iterdir())


def test_a_base_that_is_gone_is_named(run: Path, tmp_path: Path) -> None:
    folder = find_model_folder(run, print)
    moved = tmp_path / "adapter"
    shutil.copytree(folder, moved)
    config = json.loads((moved / "adapter_config.json").read_text())
    (moved / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(InputError, match=r"the adapter's base, .*gone, cannot be loaded"):
        Generator(moved)
    with pytest.raises(InputError, match=r"the adapter's base, .*gone, cannot be read"):
        export(moved, tmp_path / "out")
