"""Reads a checkpoint into a live strategy, in place: any number of workers, any strategy, whatever wrote it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from muletrain.checkpoint.index import StateReader
from muletrain.checkpoint.layout import PROGRESS, STATE, latest_complete
from muletrain.checkpoint.progress import Progress
from muletrain.checkpoint.state import State, flat_state, read_state
from muletrain.spec.errors import InputError
from muletrain.strategy.contract import Strategy


def choose(root: Path, warn: Callable[[str], None]) -> Path | None:
    """The checkpoint to resume from, chosen by worker 0 for all; None: a fresh start. Collective.

    Raises InputError on all workers if there are checkpoints and none is complete. `warn` is called on worker 0.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return latest_complete(root, warn)
    answer: list[tuple[str, ...]] = [()]
    if dist.get_rank() == 0:
        try:
            found = latest_complete(root, warn)
            answer = [("found", str(found)) if found else ("fresh",)]
        except InputError as error:
            answer = [("error", *error.problems)]
    dist.broadcast_object_list(answer, src=0)
    kind, *rest = answer[0]
    if kind == "error":
        raise InputError(*rest)
    return Path(rest[0]) if kind == "found" else None


def read_progress(folder: Path) -> Progress:
    """The position and counters of a checkpoint."""
    return Progress.load(folder / PROGRESS)


def load(folder: Path, strategy: Strategy, progress: Progress) -> None:
    """Fills the strategy's tensors and scalars from a complete checkpoint. Collective.

    Raises InputError, before anything is changed, if the checkpoint is of another model, or its index cannot be trusted.
    """
    state = flat_state(strategy)
    reader = StateReader(folder / STATE)
    _same_model(folder, state, reader)
    read_state(reader, state)
    strategy.loaded(progress.scalars)


def _same_model(folder: Path, state: State, reader: StateReader) -> None:
    saved = {
        name: tuple(entry.size) for name, entry in reader.read_metadata().state_dict_metadata.items() if hasattr(entry, "size")
    }
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    differ = [
        f"{name}: {list(saved[name]) if name in saved else 'absent'} in the checkpoint, "
        f"{list(wanted[name]) if name in wanted else 'absent'} in the model"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]
    if differ:
        more = f"\n  and {len(differ) - 5} more" if len(differ) > 5 else ""
        raise InputError(
            f"model.source: {folder} holds another model than the recipe asks for. Give the model and model.adapter that it "
            "was made with, or choose another run_dir:\n  " + "\n  ".join(differ[:5]) + more
        )
