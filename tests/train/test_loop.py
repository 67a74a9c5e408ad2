"""The loop alone, with a strategy that answers what it is told: counters, rates, skips, stops."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muletrain.checkpoint.progress import Progress
from muletrain.optim.schedule import learning_rate
from muletrain.spec.errors import WorkerFailedError
from muletrain.strategy.contract import NonFiniteError, StepContext, StepResult
from muletrain.train.hooks import Checkpointing, HookBase, Log
from muletrain.train.loop import MOST_SKIPS, Run, train
from tests.train.tiny import make_plan

WINDOWS = 5


class Stream:
    windows_per_epoch = WINDOWS

    def window(self, window: int, worker: int, workers: int) -> list[Any]:
        return [SimpleNamespace(index=0, padding_tokens=3, sample_ids=(window * 10, window * 10 + 1))]


class Told:
    """Skips the windows in `skips`; raises at window `bad`."""

    def __init__(self, skips: set[int] = frozenset(), bad: int = -1) -> None:  # type: ignore[assignment]
        self.skips, self.bad, self.contexts = skips, bad, list[StepContext]()

    def step(self, batches: Any, context: StepContext) -> StepResult:
        self.contexts.append(context)
        if context.window == self.bad:
            raise NonFiniteError("the loss is nan")
        skipped = context.window in self.skips
        return StepResult(20.0, 10, float("inf") if skipped else 1.0, skipped, 1.0, {"compute": 0.0})

    def peak_memory_bytes(self) -> int:
        return 7


class Witness(HookBase):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def start(self, run: Run) -> None:
        self.seen.append(("start", run.progress.update))

    def after_step(self, run: Run, step: Any) -> None:
        self.seen.append(("step", run.progress.update))

    def end(self, run: Run, outcome: str) -> None:
        self.seen.append((outcome, run.progress.update))


@pytest.fixture
def make_run(materials):
    def make(strategy: Told, **changes: Any) -> Run:
        session = {key: changes.pop(key) for key in ("stop_after",) if key in changes}
        plan = make_plan(materials, Path("unused"), **({"steps": 4} | changes))
        progress = Progress(windows_per_epoch=WINDOWS, rows_per_window=2, data_fingerprint="f", seed=0)
        return Run(plan, strategy, Stream(), progress, worker=0, workers=1, **session)  # type: ignore[arg-type]

    return make


def test_N02_a_skipped_step_moves_only_the_position_in_the_data(make_run):
    strategy = Told(skips={0, 2})
    run = make_run(strategy)
    assert train(run, []) == "finished"
    progress = run.progress
    assert (progress.update, progress.window, progress.tokens, progress.skipped) == (4, 6, 40, 2)
    assert [c.update for c in strategy.contexts] == [0, 0, 1, 1, 2, 3]
    schedule = run.plan.train.schedule
    expected = [learning_rate(schedule, 1e-3, 4, update) for update in (0, 0, 1, 1, 2, 3)]
    assert [c.learning_rate for c in strategy.contexts] == expected
    assert run.meter.tokens == 40


@pytest.mark.parametrize(("stop_after", "last"), [(0, 4), (1, 1), (3, 3), (9, 4)])
def test_the_time_left_is_that_of_the_session(make_run, stop_after, last):
    run = make_run(Told(), stop_after=stop_after)
    assert run.last_update == last
    train(run, [])
    assert run.progress.update == last


def test_many_skips_in_a_row_end_the_run(make_run):
    run = make_run(Told(skips=set(range(1, 200))))
    with pytest.raises(WorkerFailedError, match=f"{MOST_SKIPS} steps in a row were skipped"):
        train(run, [])
    assert run.progress.skipped == MOST_SKIPS


@pytest.mark.parametrize(
    ("steps", "epochs", "updates", "total"), [(4, 0, 4, 4), (0, 2, 10, 10), (7, 1, 5, 5), (7, 2, 7, 7), (12, 0, 12, 12)]
)
def test_S02_steps_or_epochs_whichever_ends_first(make_run, steps, epochs, updates, total):
    run = make_run(Told(), steps=steps, epochs=epochs)
    assert run.total_updates == total, "known before the first step"
    train(run, [])
    assert run.progress.update == updates
    assert run.progress.window == updates


def test_N03_a_value_that_is_no_number_stops_before_the_update_and_names_the_rows(make_run):
    run = make_run(Told(bad=2))
    witness = Witness()
    with pytest.raises(WorkerFailedError, match=r"step 3 \(window 2\): the loss is nan.*Packed rows of this window: 20, 21\."):
        train(run, [witness])
    assert run.progress.update == 2
    assert witness.seen[-1] == ("failed", 2)


def test_hooks_are_called_in_order_at_every_moment(make_run):
    first, second = Witness(), Witness()
    second.seen = first.seen
    train(make_run(Told(), steps=1), [first, second])
    assert first.seen == [("start", 0)] * 2 + [("step", 1)] * 2 + [("finished", 1)] * 2


def test_a_stop_is_noticed_at_the_end_of_the_step_under_way(make_run):
    run = make_run(Told(), stop_after=0)

    class Signal(HookBase):
        def after_step(self, run: Run, step: Any) -> None:
            run.stop.raised = True

    assert train(run, [Signal()]) == "stopped"
    assert run.progress.update == 2, "the flag was raised after step 1's exchange, so step 2 is the last"


def test_a_session_may_be_limited(make_run):
    run = make_run(Told(skips={0}), stop_after=2)
    assert train(run, []) == "stopped"
    assert run.progress.update == 2 and run.progress.window == 3


def test_a_periodic_save_that_fails_is_a_warning_and_a_last_one_an_error(make_run, monkeypatch, tmp_path):
    from muletrain.checkpoint.together import CheckpointError
    from muletrain.train import hooks

    def full(*_: object) -> None:
        raise CheckpointError("disk full")

    monkeypatch.setattr(hooks, "save", full)
    written: list[Any] = []
    log = Log(SimpleNamespace(write=written.append), SimpleNamespace(warn=written.append))  # type: ignore[arg-type]
    run = make_run(Told(), every=1)
    with pytest.raises(CheckpointError, match="disk full"):
        train(run, [Checkpointing(Path(tmp_path), None, log, None)])  # type: ignore[arg-type]
    assert run.progress.update == 4, "training went on in spite of the first three"
    assert [message for message in written if isinstance(message, str)] == ["disk full. Training goes on"] * 3
