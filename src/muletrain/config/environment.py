"""The environment variables the program listens to, and the one it sets; no other file reads any (held by a test).

A switch is read by its value, never by its presence: `=0`, `=false`, `=no`, `=off` and `=` are all off, nonsense is an error.
Libraries read their own (HF_HOME, NO_COLOR, OMP_NUM_THREADS); they are not repeated here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from muletrain.spec.errors import InputError
from muletrain.spec.place import WorkerPlace
from muletrain.spec.units import parse_flag

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Where tokenized data is kept: $MULETRAIN_CACHE, else ~/.cache/muletrain."""
    chosen = environment.get("MULETRAIN_CACHE", "").strip()
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "muletrain"


def traceback_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """$MULETRAIN_TRACEBACK: show where in the program a user error was found, for developers."""
    return _flag(environment, "MULETRAIN_TRACEBACK")


def visible_devices(environment: Mapping[str, str] = os.environ) -> str | None:
    """$CUDA_VISIBLE_DEVICES as it stands; None: all."""
    return environment.get("CUDA_VISIBLE_DEVICES")


def limit_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Bounds how long PyTorch's CPU threads spin while they wait for each other; call before torch is imported.

    By default they spin for milliseconds: on cores that other work shares, most of the time goes by with threads waiting for
    one that is not running (docs/LOG.md). A thousand turns cost a quiet machine nearly nothing. The user's own choice wins.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "1000")


def expand_segments(environment: MutableMapping[str, str] = os.environ) -> None:
    """Lets PyTorch's allocator on a card grow and shrink segments; call before torch is imported.

    By default it keeps blocks of the sizes that were asked for, so what a block's backward freed does not serve the head: a
    gibibyte or more of a 24 GiB card (docs/LOG.md). The user's own choice wins.
    """
    environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def torchrun_place(environment: Mapping[str, str] = os.environ) -> WorkerPlace | None:
    """This process's place under torchrun (or another launcher that sets the same variables); None when started alone."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    missing = [name for name in _TORCHRUN if not environment.get(name)]
    if missing:
        raise InputError(f"{', '.join(missing)}: not set, though RANK and WORLD_SIZE are; use torchrun, or unset those two")
    rank, workers, local_rank, local_workers = (_whole(environment, name) for name in _TORCHRUN[:4])
    if rank >= workers or local_rank >= local_workers:
        ranks = f"RANK={rank} of WORLD_SIZE={workers}, LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local_workers}"
        raise InputError(f"{ranks}: a rank must be less than its number of workers; start with torchrun")
    return WorkerPlace(rank=rank, workers=workers, local_rank=local_rank, local_workers=local_workers, rendezvous="env://")


def _flag(environment: Mapping[str, str], name: str) -> bool:
    try:
        return parse_flag(environment.get(name, ""))
    except ValueError as error:
        raise InputError(f"environment variable {name}: {error}") from None


def _whole(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isdecimal():
        raise InputError(f"environment variable {name}: {text!r} is not a whole number; start with torchrun")
    return int(text)
