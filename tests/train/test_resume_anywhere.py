"""What three workers saved under zero3 at step 10 of 20 goes on anywhere: the same bits there, the same curve elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from muletrain.spec.errors import EXIT_DONE, EXIT_STOPPED
from tests.train.tiny import Materials, make_materials, make_plan, run, steps_of

Curve = list[tuple[float, float]]


def curve_of(run_dir: Path) -> Curve:
    return [(event["loss"], event["grad_norm"]) for event in steps_of(run_dir)]


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> tuple[Materials, Path, Curve]:
    """(materials, a run folder stopped at step 10, the unbroken run's curve), both by three workers under zero3."""
    folder = tmp_path_factory.mktemp("anywhere")
    materials = make_materials(folder)
    unbroken, stopped = folder / "unbroken", folder / "stopped"
    for path in (unbroken, stopped):
        path.mkdir()
    assert run(materials, make_plan(materials, unbroken, steps=20, workers=3, strategy="zero3")) == EXIT_DONE
    assert run(materials, make_plan(materials, stopped, steps=20, workers=3, strategy="zero3"), stop_after=10) == EXIT_STOPPED
    return materials, stopped, curve_of(unbroken)


def resumed(halfway: tuple[Materials, Path, Curve], folder: Path, workers: int, strategy: str) -> Curve:
    materials, stopped, _ = halfway
    shutil.copytree(stopped, folder)
    activations = "recompute" if strategy == "streamed" else "keep"
    plan = make_plan(materials, folder, steps=20, workers=workers, strategy=strategy, activations=activations)
    assert run(materials, plan) == EXIT_DONE
    return curve_of(folder)


def test_R03_R05_the_same_workers_and_strategy_give_the_same_bits(halfway, tmp_path: Path) -> None:
    assert resumed(halfway, tmp_path / "again", 3, "zero3") == halfway[2]


@pytest.mark.parametrize(
    ("workers", "strategy"),
    [(1, "zero3"), (2, "zero3"), (4, "zero3"), (3, "zero1"), (2, "zero2"), (1, "streamed"), (1, "resident"), (2, "resident")],
)
def test_R05_any_other_gives_the_same_curve(halfway, tmp_path: Path, workers: int, strategy: str) -> None:
    found = resumed(halfway, tmp_path / "elsewhere", workers, strategy)
    assert len(found) == len(halfway[2]) == 20
    for ours, theirs in zip(found, halfway[2], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
