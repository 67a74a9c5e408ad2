"""Starts the workers of one box by forking this process, watches them, and ends them all together.

Forked, because the caller has imported torch once and a worker then starts in milliseconds instead of ten seconds of imports.
The price: CUDA must not have been initialised in the caller (a forked copy of a CUDA context is unusable), nor may it have run
a parallel torch operation (a forked copy of a thread pool has no threads). Planning and data preparation do neither.

Workers meet through a file in a private folder, so two runs on one box never fight for a port. They never outlive the launcher,
whatever ends it: the kernel kills them with it (PR_SET_PDEATHSIG). Rejected: torchrun as a library (spawns, so it imports torch
again in each worker, and shows the traceback of every worker that failed because another one did).
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType
from typing import Any

from muletrain.launch.run_folder import RECORD, write_atomically
from muletrain.launch.watchdog import POLL_S, STACKS, Watchdog
from muletrain.spec.errors import (
    EXIT_DONE,
    EXIT_STOPPED,
    EXIT_WORKER_FAILED,
    DoesNotFitError,
    InputError,
    MuleError,
    StoppedError,
    WorkerFailedError,
)
from muletrain.spec.place import WorkerPlace
from muletrain.spec.sign import record_file, stack_file

Target = Callable[[WorkerPlace], int]
"""Runs one worker to its end: 0 done, 75 saved after a signal. Raises for everything else."""

_PR_SET_PDEATHSIG = 1
_GATHER_S = 0.5
"""After a first failure, how long to listen for others: the cause is the earliest, not the one that was read first."""
_GRACE_S = 2.0
"""Between SIGTERM and SIGKILL for the workers that are left over after one failed."""
_MESSAGE_LIMIT = 16_000
"""Characters of a traceback: a message must fit a pipe's buffer, as nobody reads it before the worker has ended."""


@dataclass
class _Worker:
    rank: int
    process: ForkProcess
    pipe: Connection
    code: int | None = None
    report: dict[str, Any] = field(default_factory=dict)


def run(target: Target, workers: int, run_dir: Path | None = None) -> int:
    """Runs target in `workers` forked processes; returns 0 (all done) or 75 (all saved after a signal).

    SIGTERM or a first Ctrl-C is passed on, so that workers save and stop; a second one kills them at once and raises
    KeyboardInterrupt. Call from the main thread. Raises StoppedError if a signal came before there was anything to save, the
    worker's own MuleError if it raised one, WorkerFailedError with the first failing worker's traceback, or the name of the one
    that hangs, otherwise; by then no worker is left. `run_dir` gets what a dead worker 0 cannot write any more, record.json,
    and where workers stood that were found hanging.
    """
    with tempfile.TemporaryDirectory(prefix="mule-") as name:
        board = Path(name)
        sys.stdout.flush()
        sys.stderr.flush()
        started: list[_Worker] = []
        hang: str | None = None
        forwarding = _SignalForwarding(started)
        with forwarding:
            try:
                for rank in range(workers):
                    place = WorkerPlace(
                        rank=rank,
                        workers=workers,
                        local_rank=rank,
                        local_workers=workers,
                        rendezvous=f"file://{board}/rendezvous",
                        board=str(board),
                    )
                    started.append(_start(target, place))
                hang = _watch(started, board, run_dir)
            finally:
                _end(started)
                if run_dir is not None and record_file(board).exists():
                    _publish_record(record_file(board), run_dir)
        if hang is not None:
            raise WorkerFailedError(hang)
        return _verdict(started, stop_asked=forwarding.used)


def _publish_record(left: Path, run_dir: Path) -> None:
    """The summary that worker 0 left behind, where its own would be."""
    with suppress(OSError):  # a full disk must not hide why the run failed
        write_atomically(run_dir / RECORD, left.read_text(encoding="utf-8"))


def _start(target: Target, place: WorkerPlace) -> _Worker:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(target, place, theirs, os.getpid()), name=f"worker-{place.rank}")
    process.start()
    theirs.close()
    return _Worker(place.rank, process, ours)


def _child(target: Target, place: WorkerPlace, pipe: Connection, launcher: int) -> None:
    """The worker's whole life. Leaves by os._exit: the launcher's exit handlers and buffers are not this process's to run."""
    _die_with(launcher)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches the whole group; the launcher passes on one
    stacks = stack_file(Path(place.board), place.rank).open("w", encoding="utf-8")  # stays open: a signal handler writes to it
    faulthandler.register(STACKS, file=stacks, all_threads=True)
    try:
        code = target(place)
    except MuleError as error:
        problems = list(error.problems) if isinstance(error, InputError) else [str(error)]
        code = error.exit_code
        _tell(pipe, {"kind": "user", "code": code, "problems": problems})
    except BaseException:
        code = EXIT_WORKER_FAILED
        _tell(pipe, {"kind": "traceback", "text": traceback.format_exc()[-_MESSAGE_LIMIT:]})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _tell(pipe: Connection, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the launcher is gone: nobody to tell, and the exit code still says it
        pipe.send_bytes(json.dumps(message | {"time": time.monotonic()}).encode())


def _die_with(launcher: int) -> None:
    """Asks the kernel to kill this process when the launcher dies, however it dies (Linux)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:  # it died before the request was in place
        os._exit(EXIT_WORKER_FAILED)


class _SignalForwarding:
    """While active, SIGTERM and SIGINT go to the workers; a second SIGINT ends everything at once."""

    def __init__(self, workers: list[_Worker]) -> None:
        self.used = False
        self._workers = workers
        self._interrupted = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._interrupted:
            _signal_all(self._workers, signal.SIGKILL)
            raise KeyboardInterrupt
        self.used = True
        self._interrupted = self._interrupted or number == signal.SIGINT
        _signal_all(self._workers, signal.SIGTERM)


def _signal_all(workers: list[_Worker], number: int) -> None:
    for worker in workers:
        if worker.process.is_alive() and worker.process.pid:
            with suppress(ProcessLookupError):  # it ended between the two lines
                os.kill(worker.process.pid, number)


def _failed(worker: _Worker) -> bool:
    return worker.code is not None and worker.code not in (EXIT_DONE, EXIT_STOPPED)


def _watch(workers: list[_Worker], board: Path, run_dir: Path | None) -> str | None:
    """Returns when all have ended, or soon after one has failed; or, with what to tell the user, when one hangs."""
    deadline: float | None = None
    watchdog = Watchdog(board, {worker.rank: worker.process.pid or 0 for worker in workers})
    while any(worker.code is None for worker in workers):
        left = POLL_S if deadline is None else deadline - time.monotonic()
        if left <= 0:
            return None
        running = {worker.process.sentinel: worker for worker in workers if worker.code is None}
        for sentinel in wait(list(running), timeout=left):
            _reap(running[sentinel])  # type: ignore[index]
        if deadline is None and any(_failed(worker) for worker in workers):
            deadline = time.monotonic() + _GATHER_S
        hang = watchdog.hang({worker.rank for worker in workers if worker.code is None}) if deadline is None else None
        if hang is not None:
            return _hang_message(hang, watchdog.ask_for_stacks(run_dir) if run_dir else [])
    return None


def _hang_message(found: str, stacks: list[Path]) -> str:
    where = f"Where workers stood: {', '.join(map(str, stacks))}. " if stacks else ""
    return (
        f"{found}\nAll workers were ended. {where}Usual causes: a card that fell off the bus or a driver that hangs (dmesg "
        "names an Xid; nvidia-smi gives no answer either), a disk or network file system that does not answer, a process that "
        "somebody stopped. The same command goes on from the newest checkpoint. If a step may take longer, raise "
        "parallel.hang_after_s"
    )


def _reap(worker: _Worker) -> None:
    worker.process.join()
    worker.code = worker.process.exitcode
    if worker.pipe.poll():
        with suppress(EOFError):  # it ended without a message
            worker.report = json.loads(worker.pipe.recv_bytes())


def _end(workers: list[_Worker]) -> None:
    """Leaves no worker behind: asks, waits a little, kills. Workers ended here count as not having failed."""
    _signal_all(workers, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    for worker in workers:
        worker.process.join(timeout=max(0.0, deadline - time.monotonic()))
    _signal_all(workers, signal.SIGKILL)
    for worker in workers:
        worker.process.join()
        worker.pipe.close()


def _verdict(workers: list[_Worker], *, stop_asked: bool) -> int:
    if stop_asked and any(worker.code == -signal.SIGTERM for worker in workers):
        # while loading there is nothing to save yet, and SIGTERM simply ends a worker
        raise StoppedError(
            "stopped before the first step: nothing new to save; the same command starts from where this one did"
        )
    failed = [worker for worker in workers if _failed(worker)]
    if not failed:
        return EXIT_STOPPED if any(worker.code == EXIT_STOPPED for worker in workers) else EXIT_DONE
    raise _error(min(failed, key=_precedence), len(workers))


def _precedence(worker: _Worker) -> tuple[int, float]:
    """Which failure is the cause: a kill from outside, else the earliest report, else a death without a word."""
    if worker.code == -signal.SIGKILL:
        return 0, 0.0
    return (1, worker.report["time"]) if worker.report else (2, 0.0)


def _error(worker: _Worker, workers: int) -> MuleError:
    who = f"worker {worker.rank} of {workers}"
    if worker.report.get("kind") == "user":
        return _user_error(worker.report["code"], worker.report["problems"])
    if worker.report:
        return WorkerFailedError(f"{who} failed:\n{worker.report['text'].rstrip()}")
    code = worker.code or 0
    if code == -signal.SIGKILL:
        return WorkerFailedError(
            f"{who} was killed by the system (SIGKILL): probably out of host memory, which is no fault of a GPU.\n"
            "Give the machine or container more memory, or need less: fewer workers, a smaller train.micro_batch or "
            "data.sequence_length, memory.activations=recompute. The kernel's log (dmesg) names what it killed and why."
        )
    how = f"died of signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code} and no message"
    return WorkerFailedError(f"{who} {how}; what it printed last is above")


def _user_error(code: int, problems: list[str]) -> MuleError:
    for kind in (DoesNotFitError, WorkerFailedError, StoppedError):
        if kind.exit_code == code:
            return kind("\n".join(problems))
    return InputError(*problems)
