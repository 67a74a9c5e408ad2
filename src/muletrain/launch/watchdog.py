"""Tells a worker that hangs from one that is slow, and says which it is and what it did last.

A worker that is killed or raises ends, and the launcher sees that. One that stands still holds all others in a collective for
as long as its timeout is, two hours. Here the launcher reads each worker's last sign (spec.sign) every second. Time counts only
while the launcher itself runs, so a box that was asleep, or a job that was stopped whole, raises no alarm. Rejected: a short
timeout of the collectives (worker 0 may write a large model while the others wait), which does not name the worker either.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from muletrain.spec.sign import Sign, sign_file, stack_file
from muletrain.spec.units import format_duration

STACKS = signal.SIGUSR2
"""Asks a worker to write its Python stacks, whatever it is doing (faulthandler)."""
POLL_S = 1.0
_STOPPED_S = 30.0
"""A worker that was stopped (SIGSTOP) alone, while launcher and others run."""
_STACKS_S = 0.5


@dataclass
class _Watched:
    rank: int
    pid: int
    sign: Sign | None = None
    quiet_s: float = 0.0
    """Since its last new sign."""
    stopped_s: float = 0.0


class Watchdog:
    """Of the workers of one run."""

    def __init__(self, board: Path, pids: dict[int, int]) -> None:
        """`board`: the folder of the signs; `pids`: process by rank."""
        self._board = board
        self._workers = [_Watched(rank, pid) for rank, pid in pids.items()]
        self._looked = time.monotonic()

    def hang(self, running: set[int]) -> str | None:
        """Who hangs and how it was found, or None. `running`: ranks that have not ended."""
        now = time.monotonic()
        passed = min(now - self._looked, 2 * POLL_S)  # longer: this process did not run either
        self._looked = now
        workers = [worker for worker in self._workers if worker.rank in running]
        for worker in workers:
            self._look(worker, passed)
        stopped = [worker for worker in workers if worker.stopped_s >= _STOPPED_S]
        if stopped:
            return self._told(stopped, f"was stopped from outside (SIGSTOP) for {format_duration(_STOPPED_S)}", workers)
        if not workers or any(worker.sign is None for worker in workers):
            return None
        last = min(_number(worker) for worker in workers)
        behind = [worker for worker in workers if _number(worker) == last]  # the others wait for these
        if not any(_overdue(worker) for worker in behind):
            return None
        return self._told(behind, f"gave no sign of life for {format_duration(behind[0].quiet_s)}", workers)

    def _look(self, worker: _Watched, passed: float) -> None:
        sign = _read(sign_file(self._board, worker.rank)) or worker.sign
        same = sign == worker.sign
        worker.quiet_s = worker.quiet_s + passed if same else 0.0
        worker.sign = sign
        worker.stopped_s = worker.stopped_s + passed if _is_stopped(worker.pid) else 0.0

    def _told(self, found: list[_Watched], how: str, workers: list[_Watched]) -> str:
        total = len(self._workers)
        names = " and ".join(f"worker {w.rank} of {total} (process {w.pid})" for w in found)
        lines = [f"{names} {how}. What each worker did last:"]
        lines += [f"  worker {w.rank}: {w.sign.doing if w.sign else 'starting'}" for w in workers]
        return "\n".join(lines)

    def ask_for_stacks(self, folder: Path) -> list[Path]:
        """Has all workers write where they stand; moves what comes to `folder`. A stopped worker gives nothing."""
        for worker in self._workers:
            if stack_file(self._board, worker.rank).exists():  # else nobody listens, and the signal would end it
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, STACKS)
        time.sleep(_STACKS_S)
        kept = []
        for worker in self._workers:
            file = stack_file(self._board, worker.rank)
            if file.exists() and file.stat().st_size:
                kept.append(folder / f"hang-worker-{worker.rank}.txt")
                kept[-1].write_bytes(file.read_bytes())
        return kept


def _number(worker: _Watched) -> int:
    return worker.sign.number if worker.sign else 0


def _overdue(worker: _Watched) -> bool:
    return worker.sign is not None and 0 < worker.sign.limit_s < worker.quiet_s


def _read(path: Path) -> Sign | None:
    try:
        return Sign.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):  # none yet, or caught in the middle of a write: the next look finds it
        return None


def _is_stopped(pid: int) -> bool:
    """By a signal; not by a debugger. False where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0] == "T"
    except (OSError, IndexError):
        return False
