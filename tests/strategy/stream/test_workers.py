"""Several workers of one box: the numbers of one worker, whatever the layout; all gone within seconds when one is killed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from muletrain.optim.flat import FlatLayout
from muletrain.spec.plan import ModelPlan
from muletrain.strategy.stream.exchange import cut
from tests.dist.workers import run_workers
from tests.strategy.runs import Run, train, train_alone, worst
from tests.strategy.stream.test_engine import MLA_AND_EXPERTS

SMALL = {"piece": 1024}
LAYOUTS: list[dict[str, Any]] = [
    {"slots": 1, "staging": 1, "ring": 1, "waves": 3},
    {"inputs": "host", "waves": 2, "slices": (3, 1, 2)},
    {"on_card": (0, 2, 4), "waves": 3},
    {"on_card": (0, 1, 2, 3, 4), "slices": (0, 5, 1)},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_gives_one_workers_numbers(models: dict[str, ModelPlan], layout: dict[str, Any]) -> None:
    """4 micro-batches over 3 workers, 20 steps with clipping, fp32."""
    run = Run(models["llama"], strategy="streamed", compute="fp32", rate=1e-3)
    expected = train_alone(run)
    curves = run_workers(3, train, replace(run, streaming={**SMALL, **layout}))
    assert curves[0] == curves[1] == curves[2], "all workers report the same"
    assert worst(curves[0], expected) < 1e-5


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "experts"])
@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
def test_every_family_gives_one_workers_numbers(models: dict[str, ModelPlan], family: str, clip_norm: float) -> None:
    """A tied head, dropout, layers that differ (experts do not run in float64)."""
    compute, rate, bound = ("fp32", 1e-3, 1e-5) if family == "experts" else ("fp64", 3e-3, 1e-6)
    model = models.get(family) or models["llama"].model_copy(update={"config": MLA_AND_EXPERTS, "weights": "random"})
    run = Run(model, "streamed", compute, rate=rate, clip_norm=clip_norm, streaming={**SMALL, "waves": 2})
    expected = train_alone(replace(run, strategy="resident"))
    for curve in run_workers(3, train, run):
        assert worst(curve, expected) < bound


def test_slices_follow_their_shares_in_whole_blocks() -> None:
    """20 blocks of 256 numbers, the last 4 not decayed, shared 1 : 0 : 3; a piece never spans two owners or two regions."""
    layout = FlatLayout.of([("w", torch.empty(16, 256)), ("b", torch.empty(1024))])
    pieces, owners = cut(layout, 2048, (1, 0, 3))
    assert owners == (0, 2, 2, 2)
    assert [(p.start, p.stop, p.decay) for p in pieces] == [
        (0, 1280, True), (1280, 2560, True), (2560, 4096, True), (4096, 5120, False),
    ]  # fmt: skip
    assert cut(FlatLayout.of([]), 1024, (1, 1)) == ((), ())
