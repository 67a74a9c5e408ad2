"""Signs of life: what has a limit, and what may take as long as it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from muletrain.spec.place import WorkerPlace
from muletrain.spec.sign import Sign, record_file, sign_file
from muletrain.train.signs import Signs
from tests.train.tiny import make_plan, record_of, run


def _signs(board: Path, hang_after_s: float) -> Signs:
    place = WorkerPlace(rank=1, workers=2, local_rank=1, local_workers=2, rendezvous="", board=str(board))
    return Signs(place, hang_after_s)


def _last(board: Path) -> Sign:
    return Sign.model_validate_json(sign_file(board, 1).read_bytes())


@pytest.mark.parametrize(("hang_after_s", "limit_s"), [(600, 600), (10, 70), (0, 0)])
def test_steps_after_the_first_have_a_limit_that_slow_ones_raise(tmp_path, hang_after_s, limit_s):
    signs = _signs(tmp_path, hang_after_s)
    signs.show("computing step 1", step=True)
    assert _last(tmp_path).limit_s == 0, "the first compiles and warms up"
    signs.took(7.0)
    signs.took(0.5)
    signs.show("computing step 3", step=True)
    assert _last(tmp_path) == Sign(number=2, doing="computing step 3", limit_s=limit_s)
    signs.show("saving")
    assert _last(tmp_path) == Sign(number=3, doing="saving"), "a shorter sign leaves nothing of a longer one"


def test_without_a_launcher_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    signs = Signs(None, 600)
    signs.show("computing", step=True)
    signs.recorded()
    assert list(tmp_path.iterdir()) == []


def test_every_phase_of_a_run_is_shown_and_only_steps_have_limits(materials, tmp_path, monkeypatch):
    shown: list[tuple[str, bool]] = []
    real = Signs.show

    def show(self: Signs, doing: str, *, step: bool = False) -> None:
        shown.append((doing, step))
        real(self, doing, step=step)

    monkeypatch.setattr(Signs, "show", show)
    plan = make_plan(materials, tmp_path, steps=2, every=1, evaluate_every=1)
    assert Signs.show is show
    monkeypatch.setattr("tests.train.tiny.local.run", lambda target, workers, run_dir: _here(target, tmp_path))
    assert run(materials, plan) == 0
    steps = [doing for doing, step in shown if step]
    assert [doing.split()[-1] for doing in steps if doing.startswith("computing")] == ["1", "2"]
    others = {doing for doing, step in shown if not step}
    assert {
        "loading the model",
        "the dry batch",
        "evaluating after step 1",
        "saving after step 1",
        "what follows step 2",
    } <= others
    assert not record_file(tmp_path).exists() and record_of(tmp_path).outcome == "finished"


def _here(target, board):
    """The one worker in this process."""
    place = WorkerPlace(rank=0, workers=1, local_rank=0, local_workers=1, rendezvous="", board=str(board))
    return target(place)
