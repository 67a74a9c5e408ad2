"""A worker that stands still: named in seconds, with what each did last, and never confused with one that takes its time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from muletrain.launch import local, watchdog
from muletrain.launch.watchdog import Watchdog
from muletrain.spec.errors import WorkerFailedError
from muletrain.spec.place import WorkerPlace
from muletrain.spec.sign import Sign, sign_file


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The watchdog's time, set by the test."""
    now = [100.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    return now


def _show(board: Path, rank: int, number: int, doing: str, limit_s: float = 0.0) -> None:
    sign_file(board, rank).write_text(Sign(number=number, doing=doing, limit_s=limit_s).to_json())


def _after(dog: Watchdog, clock: list[float], seconds: int, running: set[int]) -> str | None:
    found = None
    for _ in range(seconds):
        clock[0] += 1
        found = found or dog.hang(running)
    return found


def test_H08_the_worker_that_is_behind_is_named_not_those_that_wait_for_it(tmp_path: Path, clock: list[float]) -> None:
    dog = Watchdog(tmp_path, {0: os.getpid(), 1: os.getpid()})
    assert _after(dog, clock, 100, {0, 1}) is None, "still starting"
    _show(tmp_path, 0, 7, "step 2 is done here; waiting for the others", limit_s=60)
    _show(tmp_path, 1, 5, "reading the data of step 2", limit_s=60)
    assert _after(dog, clock, 60, {0, 1}) is None
    found = _after(dog, clock, 2, {0, 1})
    assert found is not None and found.startswith(f"worker 1 of 2 (process {os.getpid()}) gave no sign of life for 1m 01s")
    assert "\n  worker 0: step 2 is done here" in found and "\n  worker 1: reading the data of step 2" in found


def test_what_has_no_limit_is_never_a_hang(tmp_path: Path, clock: list[float]) -> None:
    """Worker 1 saves for an hour, and worker 0, in the next step already, waits for it."""
    dog = Watchdog(tmp_path, {0: os.getpid(), 1: os.getpid()})
    _show(tmp_path, 0, 9, "computing step 3", limit_s=60)
    _show(tmp_path, 1, 8, "saving after step 2")
    assert _after(dog, clock, 3600, {0, 1}) is None


def test_new_signs_and_a_launcher_that_slept_start_no_alarm(tmp_path: Path, clock: list[float]) -> None:
    dog = Watchdog(tmp_path, {0: os.getpid()})
    for number in range(1, 5):
        _show(tmp_path, 0, number, "computing", limit_s=60)
        assert _after(dog, clock, 50, {0}) is None
    clock[0] += 10_000  # the box was asleep
    assert dog.hang({0}) is None
    assert _after(dog, clock, 20, {0}) is not None
    assert dog.hang(set()) is None, "all have ended"


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


@pytest.mark.parametrize("stopped", [True, False])
def test_H08_a_hang_ends_all_in_seconds_and_says_where_workers_stood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    monkeypatch.setattr(watchdog, "_STOPPED_S", 1.0)

    def target(place: WorkerPlace) -> int:
        (tmp_path / f"pid-{place.rank}").write_text(str(os.getpid()))
        _show(Path(place.board), place.rank, 3 - place.rank, f"on the way with {place.rank}", limit_s=0.0 if stopped else 1.0)
        if stopped and place.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
        return 0

    start = time.monotonic()
    with pytest.raises(WorkerFailedError) as caught:
        local.run(target, 2, tmp_path)
    assert time.monotonic() - start < 10
    how = "was stopped from outside (SIGSTOP)" if stopped else "gave no sign of life for"
    told = str(caught.value)
    assert told.startswith("worker 1 of 2 (process ") and how in told and "worker 0: on the way with 0" in told
    assert "parallel.hang_after_s" in told and str(tmp_path / "hang-worker-0.txt") in told
    assert "in target" in (tmp_path / "hang-worker-0.txt").read_text()
    assert (tmp_path / "hang-worker-1.txt").exists() is not stopped
    assert not any(_alive(int(file.read_text())) for file in tmp_path.glob("pid-*"))
