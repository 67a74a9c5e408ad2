"""Several streamed workers over one host memory, as `mule train` runs them: saves that go on anywhere, and clean ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from muletrain.launch import local
from muletrain.spec.errors import EXIT_DONE, EXIT_STOPPED, WorkerFailedError
from muletrain.train.build import Session
from muletrain.train.worker import run_worker
from tests.train.tiny import Materials, events_of, make_materials, make_plan, record_of, run, steps_of

LAYOUT = {"piece": 1024, "inputs": "host", "on_card": (0,)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return make_materials(tmp_path_factory.mktemp("streamed"), num_hidden_layers=3)


def plan(tiny: Materials, folder: Path, workers: int, strategy: str = "streamed", **changes: Any) -> Any:
    folder.mkdir(exist_ok=True)
    made = make_plan(tiny, folder, workers=workers, strategy=strategy, **{"activations": "recompute", "steps": 20} | changes)
    if strategy != "streamed":
        return made
    streaming = made.memory.streaming.model_copy(update=LAYOUT)
    return made.model_copy(update={"memory": made.memory.model_copy(update={"streaming": streaming})})


def curve(folder: Path) -> list[tuple[float, float]]:
    return [(event["loss"], event["grad_norm"]) for event in steps_of(folder)]


@pytest.fixture(scope="module")
def unbroken(tiny: Materials, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    folder = tmp_path_factory.mktemp("unbroken")
    assert run(tiny, plan(tiny, folder, 1)) == EXIT_DONE
    return curve(folder)


@pytest.mark.parametrize(
    ("saved_by", "goes_on"),
    [
        ((3, "streamed"), (1, "streamed")),
        ((3, "streamed"), (2, "streamed")),
        ((3, "streamed"), (2, "zero3")),
        ((1, "streamed"), (3, "streamed")),
        ((2, "zero3"), (3, "streamed")),
    ],
    ids=str,
)
def test_R05_a_save_goes_on_with_any_workers_and_strategy(
    tiny: Materials, tmp_path: Path, unbroken: list[tuple[float, float]], saved_by: tuple[int, str], goes_on: tuple[int, str]
) -> None:
    assert run(tiny, plan(tiny, tmp_path, *saved_by), stop_after=10) == EXIT_STOPPED
    assert run(tiny, plan(tiny, tmp_path, *goes_on)) == EXIT_DONE
    found = curve(tmp_path)
    assert len(found) == 20
    for mine, theirs in zip(found, unbroken, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def test_what_three_workers_report_is_whole(tiny: Materials, tmp_path: Path) -> None:
    assert run(tiny, plan(tiny, tmp_path, 3, steps=4, evaluate_every=2, evaluate_sequences=3)) == EXIT_DONE
    assert record_of(tmp_path).workers == 3
    evaluated = [event["loss"] for event in events_of(tmp_path) if event["kind"] == "evaluation"]
    assert len(evaluated) >= 2 and evaluated[-1] < evaluated[0]
    assert (tmp_path / "checkpoints" / "step-00000004" / "model" / "model.safetensors").stat().st_size > 10_000


def parents(process: str) -> list[int]:
    """Of a process, its parent and its parent's, up to the first; empty where it has ended."""
    found: list[int] = []
    while int(process) > 0:
        try:
            stat = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            break
        process = stat.rpartition(")")[2].split()[1]
        found.append(int(process))
    return found


def mappings() -> set[tuple[int, str]]:
    """(process, line) of what is mapped from memory files of ours by this process's descendants and by orphans. Other tests,
    which run beside this one, have mappings of their own."""
    found = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        above = parents(process.name)
        if os.getpid() in above or above[:1] == [1]:
            try:
                lines = (process / "maps").read_text().splitlines()
            except OSError:  # ended, or another's
                continue
            found |= {(int(process.name), line) for line in lines if "memfd:muletrain" in line}
    return found


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_worker_ends_all_within_ten_seconds(tiny: Materials, tmp_path: Path, victim: int) -> None:
    """While others wait for it in the middle of a step. No process, mapping, shared file or socket of the run is left."""
    mine = plan(tiny, tmp_path, 3, steps=100_000)
    files, before = set(os.listdir("/dev/shm")), mappings()
    pids, moment = tmp_path / "pids", []
    pids.mkdir()

    def target(place: Any) -> int:
        (pids / str(place.rank)).write_text(str(os.getpid()))
        return run_worker(mine, place, Session(tiny.prepared))

    def kill() -> None:
        while len(steps_of(tmp_path) if (tmp_path / "events.jsonl").exists() else []) < 3:
            time.sleep(0.05)
        moment.append(time.monotonic())
        os.kill(int((pids / str(victim)).read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(WorkerFailedError, match=f"worker {victim} of 3 was killed by the system"):
        local.run(target, 3)
    assert time.monotonic() - moment[0] < 10
    killer.join()
    assert not [pid for pid in pids.iterdir() if Path(f"/proc/{pid.read_text()}").exists()]
    names = {"muletrain", *(pid.read_text() for pid in pids.iterdir())}
    left = [file for file in set(os.listdir("/dev/shm")) - files if any(name in file for name in names)]
    assert mappings() <= before and not left
