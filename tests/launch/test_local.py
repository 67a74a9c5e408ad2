"""The launcher, with workers that need no torch: who failed, who is told, and that nobody is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from muletrain.launch import local
from muletrain.spec.errors import EXIT_STOPPED, DoesNotFitError, InputError, WorkerFailedError
from muletrain.spec.place import WorkerPlace


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_for(condition, timeout_s: float = 8.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def test_each_worker_gets_its_own_place(tmp_path):
    def target(place: WorkerPlace) -> int:
        (tmp_path / str(place.rank)).write_text(place.to_json())
        return 0

    assert local.run(target, 3) == 0
    places = [WorkerPlace.load(tmp_path / str(rank)) for rank in range(3)]
    assert [place.rank for place in places] == [0, 1, 2]
    assert {place.workers for place in places} == {3}
    assert len({place.rendezvous for place in places}) == 1


def test_O04_two_runs_never_share_a_rendezvous(tmp_path):
    def target(place: WorkerPlace) -> int:
        with (tmp_path / "seen").open("a") as file:
            file.write(place.rendezvous + "\n")
        return 0

    local.run(target, 1)
    local.run(target, 1)
    seen = (tmp_path / "seen").read_text().splitlines()
    assert len(set(seen)) == 2
    assert all(address.startswith("file://") for address in seen), "no port, so none can be taken"


def test_H10_first_failure_is_shown_once_and_all_end_in_seconds(tmp_path):
    def target(place: WorkerPlace) -> int:
        (tmp_path / str(place.rank)).write_text(str(os.getpid()))
        _wait_for(lambda: len(list(tmp_path.iterdir())) == 3)
        if place.rank == 1:
            raise ValueError("the disk caught fire")
        if place.rank == 0:
            time.sleep(0.1)
            raise ConnectionError("peer closed the connection")  # what the first failure does to a neighbour
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # stuck in a collective: only SIGKILL helps
        time.sleep(600)
        return 0

    start = time.monotonic()
    with pytest.raises(WorkerFailedError) as caught:
        local.run(target, 3)
    assert time.monotonic() - start < 6
    assert "worker 1 of 3 failed" in str(caught.value)
    assert str(caught.value).count("\nValueError: the disk caught fire") == 1
    assert "peer closed" not in str(caught.value)
    assert not any(_alive(int(file.read_text())) for file in tmp_path.iterdir())


def test_M07_a_kill_is_reported_as_probably_out_of_memory():
    def target(place: WorkerPlace) -> int:
        if place.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ConnectionError("peer closed the connection")

    with pytest.raises(WorkerFailedError, match=r"worker 1 of 2 was killed.*probably out of host memory"):
        local.run(target, 2)


@pytest.mark.parametrize("error", [InputError("a", "b"), DoesNotFitError("too big"), WorkerFailedError("nan")])
def test_a_workers_own_error_comes_back_as_itself(error):
    def target(place: WorkerPlace) -> int:
        raise error

    with pytest.raises(type(error)) as caught:
        local.run(target, 2)
    assert str(caught.value) == str(error)


def test_a_crash_and_a_wordless_exit_are_named():
    with pytest.raises(WorkerFailedError, match="worker 0 of 1 died of signal SIGUSR1"):
        local.run(lambda place: os.kill(os.getpid(), signal.SIGUSR1) or 0, 1)
    with pytest.raises(WorkerFailedError, match="exit code 9 and no message; what it printed last is above"):
        local.run(lambda place: 9, 1)


def test_a_very_long_traceback_does_not_block():
    def target(place: WorkerPlace) -> int:
        raise ValueError("x" * 500_000 + "the end")

    with pytest.raises(WorkerFailedError, match="the end"):
        local.run(target, 1)


_LAUNCHER = """
import os, signal, sys, time
from pathlib import Path
from muletrain.launch import local
from muletrain.spec.errors import MuleError

folder, saves = Path(sys.argv[1]), sys.argv[2] == "saves"

def target(place):
    stop = []
    if saves:
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    (folder / f"pid{place.rank}").write_text(str(os.getpid()))
    while not stop:
        time.sleep(0.01)
    if "slow" in sys.argv:
        time.sleep(600)
    (folder / f"saved{place.rank}").touch()
    return 75

try:
    code = local.run(target, 2)
except MuleError as error:
    print(error, flush=True)
    code = error.exit_code
sys.exit(code)
"""


def _launch(folder: Path, *words: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    line = [sys.executable, "-c", _LAUNCHER, str(folder), *words]
    process = subprocess.Popen(line, start_new_session=True, stdout=subprocess.PIPE)
    files = [folder / "pid0", folder / "pid1"]
    _wait_for(lambda: all(file.exists() and file.read_text() for file in files), 30)
    return process, [int(file.read_text()) for file in files]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_O06_a_signal_reaches_all_workers_and_they_save(tmp_path, number):
    process, pids = _launch(tmp_path, "saves")
    os.killpg(process.pid, number)  # as a terminal does: the launcher and its workers all get it
    assert process.wait(10) == EXIT_STOPPED
    assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()
    assert not any(map(_alive, pids))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_O05_no_worker_outlives_the_launcher_while_loading(tmp_path, number):
    process, pids = _launch(tmp_path, "loads")
    os.kill(process.pid, number)
    said, _ = process.communicate(timeout=10)
    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else EXIT_STOPPED)
    words = "stopped before the first step: nothing new to save; the same command starts from where this one did"
    assert (words in said.decode()) is (number != signal.SIGKILL)
    _wait_for(lambda: not any(map(_alive, pids)), 5)


def test_O05_a_second_interrupt_is_immediate(tmp_path):
    process, pids = _launch(tmp_path, "saves", "slow")
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None, "the first one lets them save"
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(3) != EXIT_STOPPED
    assert not any(map(_alive, pids))
