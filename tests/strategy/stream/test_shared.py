"""The workers of a box and their signals: one memory, and nobody waits for a worker that has stopped."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muletrain.metrics.communication import CommunicationMeter
from muletrain.spec.errors import DoesNotFitError, InputError, MuleError, WorkerFailedError
from muletrain.strategy.stream import shared, signals
from muletrain.strategy.stream.shared import Team, flag_count
from muletrain.strategy.stream.signals import HostSignals, StreamSignals
from tests.dist.workers import run_workers


def said(function: Callable[..., Any], *args: Any) -> tuple[str, str]:
    """(kind, message) of the MuleError that it raises."""
    try:
        function(*args)
    except MuleError as error:
        return type(error).__name__, str(error)
    return "", ""


def mapped(rank: int, workers: int) -> tuple[Team, torch.Tensor, torch.Tensor]:
    """(team, numbers to share, flags) of two units."""
    team = Team(rank, workers)
    arena = team.map(1 << 16, register=False)
    numbers, flags = arena.take(workers, torch.int64), arena.take(flag_count(2, workers), torch.int32)
    team.watch(flags)
    return team, numbers, flags


def _share(rank: int, workers: int) -> Any:
    team, numbers, _ = mapped(rank, workers)
    numbers[rank] = 10 + rank
    team.barrier()
    files = [
        os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")
    ]
    return numbers.tolist(), len([file for file in files if "/dev/shm" in file])


def test_all_workers_see_one_memory_without_a_name() -> None:
    assert run_workers(3, _share) == [([10, 11, 12], 0)] * 3


def _too_large(rank: int, workers: int) -> Any:
    return said(Team(rank, workers).map, 1 << 50, False)


def test_too_little_memory_is_said_by_all_workers() -> None:
    for kind, message in run_workers(2, _too_large):
        assert kind == DoesNotFitError.__name__ and "more than is free on this machine" in message


def _apart(rank: int, workers: int) -> Any:
    shared._box = lambda: f"box {rank}"
    return said(Team, rank, workers)


def test_workers_on_several_machines_are_refused() -> None:
    for kind, message in run_workers(2, _apart):
        assert kind == InputError.__name__
        assert "these are on several machines or in several containers" in message and "zero3" in message


def test_memory_that_cannot_be_opened_says_why() -> None:
    with pytest.raises(
        InputError, match=r"could not open worker 0's memory .*No such file.*; all workers must run as the same user"
    ):
        shared._open(os.getpid(), 98765)


def _stopped(rank: int, workers: int, how: str) -> Any:
    team, _, flags = mapped(rank, workers)
    waiting = HostSignals(flags, team, CommunicationMeter())
    if rank == 1:
        time.sleep(0.2)
        if how == "fails":
            team.stop()
        return time.monotonic(), said(team.require_all)
    answer = said(waiting.wait, 0, 1)
    return time.monotonic(), answer


def test_a_worker_that_stops_releases_the_others() -> None:
    first, second = run_workers(2, _stopped, "fails")
    assert first[1] == (WorkerFailedError.__name__, "worker 1 of 2 ended in the middle of a step; so did the others")
    assert second[1] == ("", "") and first[0] - second[0] < 1


def _impatient(rank: int, workers: int) -> Any:
    signals._PATIENCE_S = 0.1
    team, _, flags = mapped(rank, workers)
    answer = said(HostSignals(flags, team, CommunicationMeter()).wait, 0, 1) if rank == 0 else ("", "")
    team.barrier()
    return answer


def test_a_worker_that_hangs_is_not_waited_for_for_ever() -> None:
    [(kind, message), _] = run_workers(2, _impatient)
    assert kind == WorkerFailedError.__name__
    assert "another worker has not come along for 0 s in the middle of a step" in message


def _hears(rank: int, workers: int) -> Any:
    team, numbers, flags = mapped(rank, workers)
    meter = CommunicationMeter()
    both = HostSignals(flags, team, meter)
    seen = []
    for turn in range(1, 50):
        if rank == 0:
            numbers[0] = turn
            both.write(0, turn)
            both.wait(1, turn)
        else:
            both.wait(0, turn)
            seen.append(int(numbers[0]))
            both.write(1, turn)
    return seen, meter.take() > 0


def test_what_was_written_before_a_signal_is_read_after_it() -> None:
    (_, waited), (seen, _) = run_workers(2, _hears)
    assert seen == list(range(1, 50)) and waited, "waiting counts as exposed communication"


class _Driver(SimpleNamespace):
    """Answers 0 to the look-up of an address and `code` to everything else."""

    def __init__(self, code: int, **missing: Any) -> None:
        class Function:
            argtypes: Any = ()

            def __init__(self, answer: int) -> None:
                self.answer, self.calls = answer, []

            def __call__(self, *args: Any) -> int:
                self.calls.append(args)
                return self.answer

        names = {} if missing else {"cuStreamWriteValue32_v2": Function(code), "cuStreamWaitValue32_v2": Function(code)}
        super().__init__(cuMemHostGetDevicePointer_v2=Function(0), **names)


def test_a_driver_without_stream_memory_operations_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: _Driver(0, old=True))
    with pytest.raises(InputError, match=r"need a driver of CUDA 11\.7 or newer \(stream memory operations\)"):
        StreamSignals(torch.zeros(4, dtype=torch.int32))


def test_an_operation_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: _Driver(801))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    stream = StreamSignals(torch.zeros(4, dtype=torch.int32))
    with pytest.raises(WorkerFailedError, match="cuStreamWriteValue32 failed with error 801 of the CUDA driver"):
        stream.write(2, 5)
    assert stream._write.calls == [(7, 8, 5, 0)], "stream, address of the third number, value, barrier before"
