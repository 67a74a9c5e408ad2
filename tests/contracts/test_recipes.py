"""Every recipe in recipes/ is loaded, planned and built on the meta device on 1, 2, 3 and 8 workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from muletrain.config.load import load_recipe
from muletrain.models.build import build_on_meta
from muletrain.planner.resolve import resolve
from muletrain.spec.machine import Gpu, Machine
from tests.contracts.source_rules import ROOT

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
GIB = 2**30


def box(gpus: int) -> Machine:
    """A box with 24 GB cards, or a small one without any."""
    card = Gpu(name="NVIDIA GeForce RTX 4090", memory_bytes=24 * GIB, capability=(8, 9), driver="580.0")
    return Machine(hostname="box", cpu="cpu", cores=16, host_memory_bytes=(128 if gpus else 16) * GIB, gpus=(card,) * gpus)


def test_there_are_recipes() -> None:
    assert ROOT / "recipes" / "demo.yaml" in RECIPES


@pytest.mark.parametrize("gpus", [False, True], ids=["cpu", "gpus"])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_recipe_is_planned_and_built(recipe: Path, workers: int, gpus: bool) -> None:
    request = load_recipe(recipe, [f"parallel.workers={workers}"])
    plan = resolve(request, box(workers if gpus else 0))
    assert plan.parallel.workers == workers
    assert plan.parallel.device == ("cuda" if gpus else "cpu")
    assert plan.tokens_per_step == pytest.approx(request.train.tokens_per_step, rel=0.05)
    model = build_on_meta(plan.model, dtype=torch.float32, loss_chunk=plan.memory.loss_chunk)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in model.parameters()) == (
        plan.model.shape.parameters + plan.model.adapter.parameters
    )
