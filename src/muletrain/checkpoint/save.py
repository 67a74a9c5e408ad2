"""Writes a checkpoint so that at every instant, kill or full disk included, a complete one is on the disk.

Written aside, listed in a manifest, flushed, then renamed: a folder with its final name is complete or was damaged later.
Worker 0 decides the name for all (a clock read by each would put shards into several folders). The state is DCP's, so each
worker writes what it owns and any other number of workers reads it; the model beside it is an ordinary Hugging Face folder.
A save blocks: training stands still until all is written. Rejected: overwriting in place; gathering the whole state on one
worker; writing while training goes on, for which the state would have to be held twice, or each unit's next update to wait.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from muletrain.checkpoint.layout import (
    MANIFEST,
    MODEL,
    PROGRESS,
    STATE,
    FileEntry,
    Manifest,
    files_below,
    flush_to_disk,
    measure,
    problem_with,
    published,
    step_folder,
    unfinished,
    write_durably,
)
from muletrain.checkpoint.progress import Progress
from muletrain.checkpoint.state import flat_state, write_state
from muletrain.checkpoint.together import CheckpointError, on_first, together, worker, workers
from muletrain.spec.units import format_bytes
from muletrain.strategy.contract import Strategy

ModelWriter = Callable[[Path, Iterator[tuple[str, Tensor]]], None]
"""Writes a model folder from (name, whole tensor) in model order. Called on worker 0 only."""


@dataclass(frozen=True)
class Saved:
    """A published checkpoint."""

    path: Path
    size_bytes: int
    seconds: float


def save(root: Path, strategy: Strategy, progress: Progress, write_model: ModelWriter, keep: int) -> Saved:
    """Publishes root/step-N and then removes complete checkpoints beyond the newest `keep`. Collective.

    Raises CheckpointError on all workers, nothing half-written left behind, if anything fails on any of them.
    """
    start = time.monotonic()
    final = step_folder(root, progress.update)
    try:
        temporary = Path(on_first(lambda: _make_folder(root, final)))
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {final} was not saved: {error}") from None
    try:
        _write(temporary, strategy, progress, write_model)
        size = on_first(lambda: _publish(temporary, final))
    except CheckpointError as error:
        if worker() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        room = format_bytes(shutil.disk_usage(root).free)
        raise CheckpointError(
            f"checkpoint {final} was not saved: {error}. {room} are free there; earlier checkpoints are untouched"
        ) from None
    on_first(lambda: _retire(root, final, keep))
    return Saved(final, size, time.monotonic() - start)


def clean_up(root: Path) -> list[Path]:
    """Removes what killed saves left; returns it. For the holder of the run folder's lock, on one worker.

    A folder that is complete and only lacked its name is published instead: the kill came between two renames.
    """
    removed = []
    for folder in unfinished(root):
        final = root / folder.name[1:].split(".", 1)[0]
        if problem_with(folder) is None and not final.exists():
            folder.rename(final)
        else:
            shutil.rmtree(folder)
            removed.append(folder)
    return removed


def _make_folder(root: Path, final: Path) -> str:
    temporary = root / f".{final.name}.tmp-{secrets.token_hex(4)}"
    temporary.mkdir(parents=True)
    return str(temporary)


def _write(temporary: Path, strategy: Strategy, progress: Progress, write_model: ModelWriter) -> None:
    state = flat_state(strategy)
    scalars = strategy.state_scalars()
    together(lambda: write_state(temporary / STATE, state))
    together(lambda: _write_model(temporary / MODEL, strategy, write_model))
    content = progress.model_copy(update={"scalars": scalars}).to_json()
    on_first(lambda: write_durably(temporary / PROGRESS, content))
    shares = together(lambda: _measure_share(temporary))
    files = {name: entry for share in shares for name, entry in share.items()}
    manifest = Manifest(step=progress.update, files=dict(sorted(files.items())))
    on_first(lambda: write_durably(temporary / MANIFEST, manifest.to_json()))


def _write_model(folder: Path, strategy: Strategy, write_model: ModelWriter) -> None:
    """Worker 0 writes; all take part in gathering, to the end, even after a write has failed: leaving would hang the rest."""
    parameters = strategy.full_parameters()
    try:
        if worker() == 0:
            folder.mkdir()
            write_model(folder, parameters)
    finally:
        for _ in parameters:
            pass


def _measure_share(folder: Path) -> dict[str, FileEntry]:
    """Sizes and checksums of every n-th file, so that reading back is shared out; flushes them on the way."""
    share = {}
    for name in files_below(folder)[worker() :: workers()]:
        flush_to_disk(folder / name)
        share[name] = measure(folder / name)
    return share


def _publish(temporary: Path, final: Path) -> int:
    for folder in (*(path for path in temporary.rglob("*") if path.is_dir()), temporary):
        flush_to_disk(folder)
    replaced = _set_aside(final) if final.exists() else None  # damaged, or the same update after more skipped steps
    temporary.rename(final)
    flush_to_disk(final.parent)
    if replaced:
        shutil.rmtree(replaced)
    return Manifest.load(final / MANIFEST).size_bytes


def _retire(root: Path, newest: Path, keep: int) -> None:
    """Only once the new one is proven good, only complete ones count, and the newest always stays."""
    problem = problem_with(newest)
    if problem:
        raise CheckpointError(f"checkpoint {newest} was damaged right after it was saved: {problem}; none was removed")
    complete = [folder for _, folder in published(root) if folder != newest and problem_with(folder) is None]
    for folder in complete[: max(0, len(complete) - (keep - 1))]:
        shutil.rmtree(_set_aside(folder))


def _set_aside(folder: Path) -> Path:
    """Renamed before it is removed: a kill half-way leaves no folder that looks like a checkpoint."""
    return folder.rename(folder.with_name(f".{folder.name}.old-{secrets.token_hex(4)}"))
