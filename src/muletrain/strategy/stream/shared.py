"""The workers of one box: one mapping that all of them see, and who notices when one is gone.

The mapping is a memory file (memfd): it has no name in any file system, no limit of /dev/shm, and is gone with the last
process that maps it, however that ends. Worker 0 makes it; the others open it through /proc, which the kernel allows to
processes of the same user, so it works under any launcher. Rejected: POSIX shared memory (a name to clean up, and
containers give /dev/shm 64 MiB).

A worker that waits for another waits for a number in that mapping, on the processor or on a GPU's stream. If the other
dies, the number never comes. So a thread of each worker looks whether the others are alive; if one is not, all numbers are
set to what nobody can still wait for, and a mark says that they mean nothing. A worker that fails does the same itself.
Rejected: pidfd_open, which tells at once but which the filters of older containers forbid.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from muletrain.schedule.ops import PHASES
from muletrain.spec.errors import DoesNotFitError, InputError, WorkerFailedError
from muletrain.strategy.stream.arena import HostArena, require_free

_BEYOND = 1 << 30
"""No flag comes near it, so it releases every wait."""
_LOOK_S = 0.25


class Team:
    """The workers of this box. Needs a process group; making one is collective."""

    def __init__(self, worker: int, workers: int) -> None:
        """Raises InputError, on all workers, where they are not all processes of one box (and container)."""
        self.worker, self.workers = worker, workers
        places: list[Any] = [None] * workers
        dist.all_gather_object(places, (_box(), os.getpid()))
        if len({box for box, _ in places}) > 1:
            raise InputError(
                "memory.strategy: streamed shares one host memory between its workers, and these are on several machines or in "
                "several containers; start them all in one, or use memory.strategy: zero3"
            )
        self._pids = [pid for _, pid in places]
        self._flags: np.ndarray[Any, np.dtype[np.int32]] | None = None
        self._closed = threading.Event()

    def map(self, size_bytes: int, register: bool) -> HostArena:
        """One zeroed mapping for all. Collective. Raises DoesNotFitError on all workers if it is too large."""
        first = self.worker == 0
        message: list[Any] = [None]
        if first:
            try:
                require_free(size_bytes)
                message = [("file", _make_file(size_bytes))]
            except DoesNotFitError as error:
                message = [("error", str(error))]
        dist.broadcast_object_list(message, src=0)
        kind, value = message[0]
        if kind == "error":
            raise DoesNotFitError(value)
        file = value if first else _open(self._pids[0], value)
        arena = HostArena(size_bytes, register=False, file=file)
        if first and register:
            arena.touch()
        dist.barrier()  # nothing is in the memory before; and worker 0's descriptor lasts until all have opened it
        os.close(file)
        if register:  # all at once
            arena.register()
        return arena

    def watch(self, flags: Any) -> None:
        """`flags`: the shared tensor of `flag_count` numbers. From now on a worker that dies releases the others' waits."""
        self._flags = flags.numpy()
        others = {worker: (pid, _started(pid)) for worker, pid in enumerate(self._pids) if worker != self.worker}
        dist.barrier()  # while all are alive: a number of a process that ended may be another's
        threading.Thread(target=self._watch, args=(others,), daemon=True, name="peers").start()

    def _watch(self, others: dict[int, tuple[int, str]]) -> None:
        while not self._closed.wait(_LOOK_S):
            gone = [worker for worker, (pid, started) in others.items() if _started(pid) != started]
            if gone:  # again and again: another may have written a number since
                self.stop(gone[0])

    def close(self) -> None:
        """Watches no longer."""
        self._closed.set()

    def stop(self, culprit: int | None = None) -> None:
        """Releases all waits of all workers, because `culprit` (this worker if left out) takes no part any more."""
        assert self._flags is not None
        if self._flags[-1] == 0:
            self._flags[-1] = 1 + (self.worker if culprit is None else culprit)
        self._flags[:-1] = _BEYOND

    def require_all(self) -> None:
        """Raises WorkerFailedError if a worker has stopped: what was waited for may never have been there."""
        assert self._flags is not None
        culprit = int(self._flags[-1]) - 1
        if culprit >= 0 and culprit != self.worker:
            raise WorkerFailedError(f"worker {culprit} of {self.workers} ended in the middle of a step; so did the others")

    def barrier(self) -> None:
        """Until all workers are here."""
        self.require_all()
        dist.barrier()


def flag_count(units: int, workers: int) -> int:
    """Numbers that workers signal with, and the mark that one has stopped."""
    return len(PHASES) * workers * units + 1


def _box() -> str:
    """What processes that can open each other's files have in common: a kernel's boot, a container's process numbers."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()} {os.readlink('/proc/self/ns/pid')}"


def _make_file(size_bytes: int) -> int:
    file = os.memfd_create("muletrain")
    os.ftruncate(file, -(-size_bytes // os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PAGE_SIZE"))
    return file


def _open(pid: int, file: int) -> int:
    try:
        return os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
    except OSError as error:
        raise InputError(
            f"memory.strategy: streamed could not open worker 0's memory (/proc/{pid}/fd/{file}: {error.strerror}); all "
            "workers must run as the same user, in one container"
        ) from error


def _started(pid: int) -> str:
    """When a process began, in the kernel's ticks: with its number, what no other has. Empty if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except FileNotFoundError:
        return ""
    return "" if state in "ZX" else fields[18]
