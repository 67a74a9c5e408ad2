"""Runs jobs in spawned processes that never outlive their parent, or in this one.

Spawned, not forked: the caller may hold threads (a progress bar, a tokenizer's pool) that a fork would lose. Rejected:
multiprocessing.Pool (hangs when a child is killed for memory).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TypeVar

from muletrain.spec.errors import WorkerFailedError

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_jobs(function: Callable[[Job], Result], jobs: Sequence[Job], processes: int) -> Iterator[Result]:
    """Results as they come, in any order. `function` must be importable; its exceptions are raised here.

    Raises WorkerFailedError if a process dies. Stopping early (an exception, the iterator closed) ends the processes.
    """
    processes = min(processes, len(jobs))
    if processes <= 1:
        yield from map(function, jobs)
        return
    context = get_context("spawn")
    # Children end when the other end of this pipe closes: when we say so, and when this process is killed.
    reader, writer = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_follow_parent, initargs=(reader,))
    try:
        for future in as_completed([pool.submit(function, job) for job in jobs]):
            yield future.result()
    except BrokenProcessPool:
        raise WorkerFailedError(
            "a tokenizing process was killed, most likely because host memory ran out; lower data.processes and start again: "
            "what is done is kept"
        ) from None
    except BaseException:
        writer.close()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        writer.close()
        reader.close()


def _follow_parent(reader: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends us
    threading.Thread(target=_end_with, args=(reader,), daemon=True).start()


def _end_with(reader: Connection) -> None:
    try:
        reader.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
