"""Doing one thing on several workers so that it succeeds on all or fails on all: a worker that fails alone hangs the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from muletrain.spec.errors import WorkerFailedError

T = TypeVar("T")


class CheckpointError(WorkerFailedError):
    """A checkpoint could not be written, on any worker; raised on all. What was there before is untouched."""


def worker() -> int:
    """This worker's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def workers() -> int:
    """Workers in the group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def together(action: Callable[[], T]) -> list[T]:
    """Runs action on every worker; returns all results by rank on every worker. Collective.

    Raises CheckpointError everywhere if it raised anywhere. `action` may itself be collective only if it fails on all or none.
    """
    result: Any = None
    problem: str | None = None
    try:
        result = action()
    except Exception as error:  # whatever it is, the others must hear of it before this worker leaves
        problem = _cause(error)
    if workers() == 1:
        outcomes = [(problem, result)]
    else:
        outcomes = [(None, None)] * workers()
        dist.all_gather_object(outcomes, (problem, result))
    for rank, (problem, _) in enumerate(outcomes):
        if problem is not None:
            raise CheckpointError(problem if workers() == 1 else f"worker {rank}: {problem}")
    return [result for _, result in outcomes]


def on_first(action: Callable[[], T]) -> T:
    """Runs action on worker 0 alone and gives its result to all. Collective; fails on all."""
    mine: Callable[[], Any] = action if worker() == 0 else _nothing
    result: T = together(mine)[0]
    return result


def _nothing() -> None:
    return None


def _cause(error: BaseException) -> str:
    """The system's own words where a library wrapped them ("No space left on device" under three layers)."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, OSError) and at.strerror:
            return f"{at.strerror}{f' ({at.filename})' if at.filename else ''}"
        at = at.__cause__ or at.__context__
    if "inline_container" in str(error):  # torch's zip writer checks only how much came through
        return "the disk did not take all of a file; it is full, or a quota is"
    return f"{type(error).__name__}: {str(error).strip()}"
