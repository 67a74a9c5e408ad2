"""Whole runs on the real stack: forked workers, FSDP2 on gloo, checkpoints on disk. By case."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from muletrain.data.dataset import open_prepared
from muletrain.data.stream import TrainingStream
from muletrain.launch import local, watchdog
from muletrain.optim.schedule import learning_rate
from muletrain.spec.errors import EXIT_DONE, EXIT_STOPPED, DoesNotFitError, WorkerFailedError
from muletrain.train import build, hooks
from tests.train.tiny import events_of, make_materials, make_plan, record_of, run, steps_of


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "checkpoints" / f"step-{step:08d}" / "model" / "model.safetensors")


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _curve(run_dir: Path, *keys: str) -> list[tuple[float, ...]]:
    return [tuple(event[key] for key in keys) for event in steps_of(run_dir)]


def _windows(materials, plan) -> int:
    train, data = plan.train, plan.data
    stream = TrainingStream(
        open_prepared(materials.prepared), sequence_length=data.sequence_length, packing=data.packing,
        micro_batch=train.micro_batch, micro_batches=train.micro_batches, seed=train.seed,
    )  # fmt: skip
    return stream.windows_per_epoch


@pytest.fixture
def rows_read(monkeypatch, tmp_path) -> Callable[[], list[tuple[int, ...]]]:
    """Writes the rows of each window that a single worker reads to a file; the function gives them in order."""
    file, real = tmp_path / "rows-read", TrainingStream.window

    def window(self: Any, *place: int) -> Any:
        batches = real(self, *place)
        with file.open("a") as out:
            out.write(",".join(str(row) for batch in batches for row in batch.sample_ids) + "\n")
        return batches

    monkeypatch.setattr(TrainingStream, "window", window)

    def read() -> list[tuple[int, ...]]:
        lines = [tuple(map(int, line.split(","))) for line in file.read_text().splitlines()]
        file.unlink()
        return lines

    return read


def test_R01_R02_rows_of_a_broken_run_are_those_of_an_unbroken_one(materials, tmp_path, rows_read):
    whole = make_plan(materials, _folder(tmp_path / "whole"), steps=0, epochs=3)
    each = _windows(materials, whole)
    assert run(materials, whole) == EXIT_DONE
    expected = rows_read()
    assert len(expected) == 3 * each
    broken = make_plan(materials, _folder(tmp_path / "broken"), steps=0, epochs=3)
    assert run(materials, broken, stop_after=each // 2) == EXIT_STOPPED
    assert run(materials, broken, stop_after=each - each // 2) == EXIT_STOPPED, "stops exactly at the end of an epoch"
    assert run(materials, broken) == EXIT_DONE, "and goes on into the next"
    assert rows_read() == expected
    epochs = [[row for window in expected[e * each : (e + 1) * each] for row in window] for e in range(3)]
    assert sorted(epochs[0]) == sorted(set(epochs[1])) == sorted(epochs[2]), "each row once an epoch"
    assert epochs[0] != epochs[1] != epochs[2], "in another order each time"
    assert _curve(tmp_path / "broken", "step", "loss") == _curve(tmp_path / "whole", "step", "loss")


def test_R03_unbroken_and_broken_weights_are_equal_to_the_bit_with_dropout_on(tmp_path):
    from tests.families import tiny

    materials = make_materials(tmp_path)
    source = tiny.tiny_gpt2(tmp_path / "gpt2", n_embd=32, resid_pdrop=0.1, embd_pdrop=0.1)
    model = tiny.model_plan(source)
    whole = make_plan(materials, _folder(tmp_path / "whole")).model_copy(update={"model": model})
    broken = whole.model_copy(update={"run_dir": str(_folder(tmp_path / "broken"))})
    run(materials, whole)
    run(materials, broken, stop_after=3)
    run(materials, broken)
    assert _same(_weights(tmp_path / "broken", 6), _weights(tmp_path / "whole", 6))
    assert not _same(_weights(tmp_path / "broken", 3), _weights(tmp_path / "whole", 6))


def test_R03_E05_evaluations_and_saves_leave_training_untouched(materials, tmp_path):
    plain, busy = _folder(tmp_path / "plain"), _folder(tmp_path / "busy")
    run(materials, make_plan(materials, plain))
    run(materials, make_plan(materials, busy, evaluate_every=1, every=1))
    assert _same(_weights(plain, 6), _weights(busy, 6))
    assert [event["kind"] for event in events_of(busy)].count("evaluation") == 6
    assert [child.name for child in sorted((busy / "checkpoints").iterdir())] == ["step-00000005", "step-00000006"]


@pytest.mark.parametrize(("workers", "strategy"), [(1, "zero3"), (3, "zero1"), (1, "streamed")])
def test_R05_resumed_on_another_number_of_workers_or_strategy(materials, tmp_path, workers, strategy):
    whole, moved = _folder(tmp_path / "whole"), _folder(tmp_path / "moved")
    run(materials, make_plan(materials, whole))
    run(materials, make_plan(materials, moved, workers=2, strategy="zero3"), stop_after=3)
    assert run(materials, make_plan(materials, moved, workers=workers, strategy=strategy)) == EXIT_DONE
    for ours, theirs in zip(
        _curve(moved, "step", "loss", "grad_norm"), _curve(whole, "step", "loss", "grad_norm"), strict=True
    ):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert [(e["kind"], e.get("workers")) for e in events_of(moved) if e["kind"] in ("start", "resume")] == [
        ("start", 2),
        ("resume", workers),
    ]


def test_R09_a_resumed_session_reports_its_own_numbers(materials, tmp_path):
    plan = make_plan(materials, tmp_path)
    run(materials, plan, stop_after=4)
    first = record_of(tmp_path)
    run(materials, plan)
    second = record_of(tmp_path)
    steps = steps_of(tmp_path)
    assert (first.outcome, first.steps, second.outcome, second.steps) == ("stopped", 4, "finished", 6)
    assert first.tokens == sum(step["tokens"] for step in steps[:4])
    assert second.tokens == sum(step["tokens"] for step in steps[4:])
    assert second.seconds == pytest.approx(sum(step["step_s"] for step in steps[4:]))
    assert second.tokens_per_s == pytest.approx(second.tokens / second.seconds)


def test_a_finished_run_says_so_and_keeps_its_record(materials, tmp_path, capfd):
    plan = make_plan(materials, tmp_path, console="plain")
    run(materials, plan)
    before = record_of(tmp_path)
    assert run(materials, plan) == EXIT_DONE
    assert "nothing to train: the run is at update 6 of 6" in capfd.readouterr().out
    assert record_of(tmp_path) == before


def test_N08_S01_logged_values_and_rates_do_not_depend_on_the_split(materials, tmp_path):
    splits = {
        "one": {"micro_batch": 4, "micro_batches": 1},
        "accumulated": {"micro_batch": 1, "micro_batches": 4},
        "two workers": {"micro_batch": 1, "micro_batches": 4, "workers": 2},
    }
    curves = {}
    for name, changes in splits.items():
        plan = make_plan(materials, _folder(tmp_path / name), **changes)
        run(materials, plan)
        curves[name] = _curve(tmp_path / name, "learning_rate", "tokens", "loss", "grad_norm")
    train = plan.train
    for curve in curves.values():
        assert [step[0] for step in curve] == [learning_rate(train.schedule, 1e-3, 6, update) for update in range(6)]
        for ours, theirs in zip(curve, curves["one"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


def test_S02_an_epoch_has_as_many_updates_as_planned_on_any_number_of_workers(materials, tmp_path):
    for workers in (1, 2):
        plan = make_plan(materials, _folder(tmp_path / str(workers)), steps=0, epochs=1, micro_batches=3, workers=workers)
        run(materials, plan)
        assert len(steps_of(tmp_path / str(workers))) == _windows(materials, plan)


def test_S04_speed_counts_trained_tokens_of_all_workers_and_padding_apart(materials, tmp_path):
    plan = make_plan(materials, tmp_path, packing="none", workers=2, evaluate_every=2)
    run(materials, plan)
    steps, record = steps_of(tmp_path), record_of(tmp_path)
    for step in steps:
        assert step["tokens"] + step["padding_tokens"] >= 4 * 8
        assert step["padding_tokens"] > 0
        assert step["tokens_per_s"] == pytest.approx(step["tokens"] / step["step_s"])
    data = open_prepared(materials.prepared)
    stream = TrainingStream(data, sequence_length=32, packing="none", micro_batch=1, micro_batches=4, seed=3)
    assert [s["tokens"] for s in steps] == [sum(b.tokens for b in stream.window(w, 0, 1)) for w in range(6)]
    assert record.tokens == sum(step["tokens"] for step in steps)
    assert record.seconds == pytest.approx(sum(step["step_s"] for step in steps))
    assert 0 < record.communication_exposed < 1
    assert record.communication_overlapped is None, "gloo cannot show it, so it is not measured, never 0"


def test_one_worker_has_no_communication_share(materials, tmp_path):
    run(materials, make_plan(materials, tmp_path, steps=2, strategy="zero3"))
    assert record_of(tmp_path).communication_exposed is None


@pytest.fixture
def poison(monkeypatch) -> Callable[[int, int], None]:
    """poison(rank, call): the hidden states of one worker become NaN in its n-th forward, the dry batch counted."""

    def set_up(rank: int, call: int) -> None:
        real = build.build_strategy

        def poisoned(plan: Any, model: Any, weights: Any, device: Any) -> Any:
            calls = [0]

            def hook(module: Any, inputs: Any, output: Any) -> Any:
                calls[0] += 1
                mine = not torch.distributed.is_initialized() or torch.distributed.get_rank() == rank
                return output * float("nan") if mine and calls[0] == call else output

            model.get_submodule("hf.model.embed_tokens").register_forward_hook(hook)
            return real(plan, model, weights, device)

        monkeypatch.setattr(build, "build_strategy", poisoned)

    return set_up


def test_N03_nan_stops_the_run_and_good_checkpoints_stay(materials, tmp_path, poison):
    poison(0, 1 + 4 * 4 + 1)
    with pytest.raises(WorkerFailedError, match=r"step 5 \(window 4\).*Packed rows of this window: \d+(, \d+){3}\."):
        run(materials, make_plan(materials, tmp_path, every=1))
    assert sorted(child.name for child in (tmp_path / "checkpoints").iterdir()) == ["step-00000003", "step-00000004"]
    assert record_of(tmp_path).outcome == "failed"
    assert all(tensor.isfinite().all() for tensor in _weights(tmp_path, 4).values())


@pytest.mark.parametrize("strategy", ["resident", "zero3"])
def test_N04_nan_on_one_worker_is_one_decision_of_all(materials, tmp_path, poison, strategy):
    poison(1, 1 + 2 * 2 + 1)
    start = time.monotonic()
    with pytest.raises(WorkerFailedError, match=r"step 3 \(window 2\).*Packed rows of this window: \d+(, \d+){3}\."):
        run(materials, make_plan(materials, tmp_path, workers=2, strategy=strategy))
    assert time.monotonic() - start < 30
    assert len(steps_of(tmp_path)) == 2


def test_H10_a_worker_that_raises_ends_all_with_its_traceback_once(materials, tmp_path, monkeypatch):
    real = TrainingStream.window

    def window(self: Any, number: int, worker: int, workers: int) -> Any:
        if (number, worker) == (2, 1):
            raise ZeroDivisionError("worker 1 at step 3")
        return real(self, number, worker, workers)

    monkeypatch.setattr(TrainingStream, "window", window)
    start = time.monotonic()
    with pytest.raises(WorkerFailedError) as caught:
        run(materials, make_plan(materials, tmp_path, workers=2, strategy="zero3"))
    assert time.monotonic() - start < 30
    assert str(caught.value).startswith("worker 1 of 2 failed:")
    assert str(caught.value).count("Traceback") == 1 and "ZeroDivisionError: worker 1 at step 3" in str(caught.value)


@pytest.mark.parametrize(
    ("victim", "number", "told"),
    [(0, signal.SIGKILL, "worker 0 of 2 was killed"), (1, signal.SIGKILL, "worker 1 of 2 was killed"),
     (1, signal.SIGSTOP, "worker 1 of 2 .* was stopped from outside"), (0, None, "worker 0 of 2 .* gave no sign of life")],
)  # fmt: skip
def test_H08_H10_a_dead_or_hanging_worker_ends_all_and_the_record_says_so(
    materials, tmp_path, monkeypatch, victim, number, told
):
    """In the middle of the third step, worker 0 included: nobody is left, no private folder either, and the record is there."""
    real = TrainingStream.window

    def window(self: Any, at: int, worker: int, workers: int) -> Any:
        if (at, worker) == (2, victim):
            if number is not None:
                os.kill(os.getpid(), number)
            time.sleep(600)
        return real(self, at, worker, workers)

    monkeypatch.setattr(TrainingStream, "window", window)
    monkeypatch.setattr(watchdog, "_STOPPED_S", 1.0)
    (tmp_path / "private").mkdir()
    monkeypatch.setattr(local.tempfile, "tempdir", str(tmp_path / "private"))
    plan = make_plan(materials, tmp_path / "run", workers=2, strategy="zero2", every=2, hang_after_s=2)
    (tmp_path / "run").mkdir()
    start = time.monotonic()
    with pytest.raises(WorkerFailedError, match=told):
        run(materials, plan)
    assert time.monotonic() - start < 20  # loading and two steps included
    record = record_of(tmp_path / "run")
    assert (record.outcome, record.steps, record.workers) == ("failed", 2, 2)
    assert record.tokens == sum(step["tokens"] for step in steps_of(tmp_path / "run"))
    assert not list((tmp_path / "private").iterdir())
    assert multiprocessing.active_children() == []
    monkeypatch.setattr(TrainingStream, "window", real)
    assert run(materials, plan) == EXIT_DONE
    assert record_of(tmp_path / "run").outcome == "finished"


def test_O06_sigterm_to_one_worker_while_training_saves_on_all(materials, tmp_path, monkeypatch):
    real = TrainingStream.window

    def window(self: Any, number: int, worker: int, workers: int) -> Any:
        if (number, worker) == (2, 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, number, worker, workers)

    monkeypatch.setattr(TrainingStream, "window", window)
    plan = make_plan(materials, tmp_path, workers=2, strategy="zero2")
    assert run(materials, plan) == EXIT_STOPPED
    assert [child.name for child in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    assert record_of(tmp_path).outcome == "stopped"
    monkeypatch.undo()
    assert run(materials, plan) == EXIT_DONE
    assert [step for (step,) in _curve(tmp_path, "step")] == [1, 2, 3, 4, 5, 6]


def test_O06_sigterm_during_an_evaluation_saves(materials, tmp_path, monkeypatch):
    real = hooks.evaluate

    def evaluate(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    monkeypatch.setattr(hooks, "evaluate", evaluate)
    assert run(materials, make_plan(materials, tmp_path, evaluate_every=2)) == EXIT_STOPPED
    assert [child.name for child in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


def test_running_out_of_memory_is_an_answer_with_advice_before_step_1(materials, tmp_path, monkeypatch):
    def too_long(self: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    monkeypatch.setattr(TrainingStream, "longest", too_long)
    with pytest.raises(
        DoesNotFitError, match=r"ran out of card memory .* with 1 sequences of 32 tokens .*activations=recompute"
    ):
        run(materials, make_plan(materials, tmp_path))
    assert not (tmp_path / "checkpoints").exists()


def test_compile_time_is_in_no_speed(materials, tmp_path, monkeypatch):
    spent = iter(float(second) for second in range(0, 1000, 1))
    monkeypatch.setattr("muletrain.train.loop.compile_seconds", lambda: next(spent) * 1e-3)
    run(materials, make_plan(materials, tmp_path, steps=3))
    steps, record = steps_of(tmp_path), record_of(tmp_path)
    for step in steps:
        assert step["parts_s"]["compile"] == pytest.approx(1e-3)
        assert step["tokens_per_s"] == pytest.approx(step["tokens"] / (step["step_s"] - 1e-3))
    assert record.seconds == pytest.approx(sum(step["step_s"] for step in steps) - 3e-3)
