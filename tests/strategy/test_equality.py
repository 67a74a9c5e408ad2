"""The promise: the same answer however the work is split, to the rounding of the stated dtype."""

from __future__ import annotations

from dataclasses import replace

import pytest

from muletrain.spec.plan import ModelPlan
from tests.dist.workers import run_workers
from tests.strategy.runs import Run, train, train_alone, worst

FAMILIES = ["llama", "qwen3", "gpt2"]
ZERO = ["zero1", "zero2", "zero3"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("compute", ["fp32", "fp64"])
def test_one_worker_same_micro_batches_bit_equal(models: dict[str, ModelPlan], family: str, compute: str) -> None:
    """resident, streamed and zero* give the very same losses and norms, with dropout where the model has it."""
    base = Run(models[family], compute=compute, rate=1e-3)
    resident = train_alone(base)
    assert resident[-1][0] < resident[0][0]
    assert train_alone(replace(base, strategy="streamed", activations="recompute")) == resident
    assert train_alone(replace(base, activations="recompute")) == resident
    for strategy in ZERO:
        [sharded] = run_workers(1, train, replace(base, strategy=strategy))
        assert sharded == resident, strategy


SPLITS = [
    ("resident", 2, 2, "keep"),
    ("resident", 3, 2, "recompute"),
    ("zero1", 2, 1, "keep"),
    ("zero1", 3, 2, "recompute"),
    ("zero2", 2, 4, "keep"),
    ("zero2", 3, 2, "keep"),
    ("zero3", 1, 8, "keep"),
    ("zero3", 2, 2, "recompute"),
    ("zero3", 3, 2, "keep"),
    ("streamed", 1, 8, "recompute"),
    ("streamed", 2, 2, "recompute"),
    ("streamed", 3, 2, "recompute"),
    ("streamed", 3, 4, "recompute"),
]


@pytest.mark.parametrize(("compute", "rate", "bound"), [("fp64", 3e-3, 1e-6), ("fp32", 1e-3, 1e-5)])
@pytest.mark.parametrize(("strategy", "workers", "micro_batch", "activations"), SPLITS)
def test_N06_N07_N10_any_split_gives_the_same_losses_and_norms(
    models: dict[str, ModelPlan],
    strategy: str,
    workers: int,
    micro_batch: int,
    activations: str,
    compute: str,
    rate: float,
    bound: float,
) -> None:
    """Workers 1 to 3, accumulation 1 to 8, uneven deals (4 micro-batches over 3 workers), every stage."""
    family = "llama" if strategy != "zero1" else "qwen3"
    base = Run(models[family], compute=compute, rate=rate, micro_batch=2)
    split = replace(base, strategy=strategy, micro_batch=micro_batch, activations=activations)
    expected = train_alone(base)
    for curve in run_workers(workers, train, split):
        assert worst(curve, expected) < bound
