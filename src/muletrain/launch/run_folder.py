"""The run folder before a run: can it be written, is it free, and the files that say what was asked and decided.

All of it is checked before any model is loaded: a path that fails after an hour of loading is an hour lost. The lock is the
kernel's (flock), so a run that died, however, has released it; a file with a process id in it would have to be judged.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from muletrain.config.render import dump_recipe
from muletrain.spec.errors import InputError
from muletrain.spec.machine import Machine
from muletrain.spec.plan import Plan
from muletrain.spec.recipe import RunConfig
from muletrain.spec.units import format_bytes

REQUEST, MACHINE, PLAN, RECORD, CHECKPOINTS = "request.yaml", "machine.json", "plan.json", "record.json", "checkpoints"
_FILES = (REQUEST, MACHINE, PLAN, "events.jsonl", RECORD)
_DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


def prepare_run_folder(path: Path, resume: Literal["auto", "never", "require"]) -> None:
    """Makes the folder and proves that it can be written. Raises InputError naming `run_dir` and the fix otherwise."""
    problem = _problem_with(path)
    if problem:
        raise InputError(f"run_dir: {problem}")
    used = has_checkpoints(path)
    if used and resume == "never":
        raise InputError(
            f"run_dir: {path} already holds checkpoints and checkpoint.resume=never. Choose another run_dir, or continue this "
            "run with checkpoint.resume=auto"
        )
    if not used and resume == "require":
        raise InputError(f"run_dir: {path} has no checkpoint to resume from, and checkpoint.resume=require asks for one")


def has_checkpoints(path: Path) -> bool:
    """Whether the run has saved before, complete or not."""
    steps = path / CHECKPOINTS
    return steps.is_dir() and any(child.name.startswith("step-") for child in steps.iterdir())


def _problem_with(path: Path) -> str | None:
    for place in (path, *path.parents):
        if place.is_file():
            return f"{place} is a file; choose a folder"
        if place.is_symlink() and not place.exists():
            return f"{place} is a symbolic link to nothing; make its target, {place.readlink()}, or choose another folder"
    try:
        path.mkdir(parents=True, exist_ok=True)
        for folder in (path, path / CHECKPOINTS):
            if folder.is_dir():
                with tempfile.NamedTemporaryFile(dir=folder, prefix=".write-test-") as file:
                    file.write(b"x")
                    file.flush()
    except OSError as error:
        return _unwritable(path, error)
    in_the_way = [name for name in _FILES if (path / name).is_dir()]
    if (path / CHECKPOINTS).is_symlink() or (path / CHECKPOINTS).exists():
        in_the_way += [] if (path / CHECKPOINTS).is_dir() else [CHECKPOINTS]
    if in_the_way:
        kind = "no folder" if in_the_way == [CHECKPOINTS] else "a folder"
        return f"{path / in_the_way[0]} is {kind}, and a run writes its own there; move it away, or choose another folder"
    return None


def _unwritable(path: Path, error: OSError) -> str:
    return f"{path} cannot be written ({error.strerror}); choose a folder that you may write to, with space left"


def space_warning(path: Path, plan: Plan) -> str | None:
    """One sentence if the checkpoints that the plan keeps will not fit the disk as it is now."""
    state = 3 * (8 if plan.precision.compute == "fp64" else 4)
    one = plan.model.shape.parameters * (state + _DTYPE_BYTES[plan.checkpoint.model_dtype])
    need, free = one * (plan.checkpoint.keep + 1), shutil.disk_usage(path).free
    if need <= free:
        return None
    return (
        f"checkpoints need {format_bytes(need)} in {path} ({plan.checkpoint.keep} kept and one being written, "
        f"{format_bytes(one)} each), and {format_bytes(free)} are free: saving will fail. "
        "Free some space, or lower checkpoint.keep"
    )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the run folder for this run. Raises InputError if a live run holds it."""
    with (path / ".lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise InputError(
                    f"run_dir: {path} cannot be locked ({error.strerror}); choose a folder on a local disk"
                ) from None
            file.seek(0)
            raise InputError(
                f"run_dir: {path} is in use by a live run ({file.read().strip() or 'unknown process'}). "
                "Wait for it, stop it, or choose another run_dir"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()}\n")
        file.flush()
        yield


def write_atomically(path: Path, text: str) -> None:
    """The file holds either its old content or all of the new one, whatever happens."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise


def write_inputs(folder: Path, request: RunConfig, machine: Machine, plan: Plan) -> None:
    """request.yaml, machine.json and plan.json: any stage can be run again from them. Raises InputError."""
    try:
        write_atomically(folder / REQUEST, dump_recipe(request))
        write_atomically(folder / MACHINE, machine.to_json())
        write_atomically(folder / PLAN, plan.to_json())
    except OSError as error:
        raise InputError(f"run_dir: {_unwritable(folder, error)}") from None
