"""What a checkpoint on disk is, and which of them is the latest complete one.

    checkpoints/step-00000120/   state/ (DCP)  model/ (Hugging Face)  progress.json  manifest.json
    checkpoints/.step-00000120.tmp-…/   one being written, or what a killed run left of it

A folder counts only if its manifest, the last file written, agrees with every file in it. A pointer file ("latest") was
rejected: it is a second truth that a full disk or a kill leaves behind the first one.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from muletrain.spec.errors import InputError
from muletrain.spec.value import Value

STATE, MODEL, PROGRESS, MANIFEST = "state", "model", "progress.json", "manifest.json"
_STEP = re.compile(r"step-(\d+)")
_UNFINISHED = re.compile(r"\.step-\d+\.(tmp|old)-.*")
_NEEDED = (PROGRESS, f"{STATE}/.metadata")
_VERSION = 1
_CHECKED_BYTES = 16 * 2**20
"""Files up to this size are read again when a checkpoint is chosen; larger ones are judged by size."""


class FileEntry(Value):
    """One file as it was when the checkpoint was complete."""

    size_bytes: int
    crc32: int


class Manifest(Value):
    """All files of a checkpoint but the manifest itself, by path relative to its folder."""

    schema_version: int = _VERSION
    step: int
    files: dict[str, FileEntry]

    @property
    def size_bytes(self) -> int:
        """All files together."""
        return sum(entry.size_bytes for entry in self.files.values())


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint after `step` updates is published."""
    return root / f"step-{step:08d}"


def published(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all published checkpoints, complete or not, by number (10000 after 9900)."""
    if not root.is_dir():
        return []
    named = ((_STEP.fullmatch(child.name), child) for child in root.iterdir() if child.is_dir())
    return sorted((int(match[1]), child) for match, child in named if match)


def unfinished(root: Path) -> list[Path]:
    """What killed saves and deletions left."""
    return sorted(child for child in root.iterdir() if _UNFINISHED.fullmatch(child.name)) if root.is_dir() else []


def files_below(folder: Path) -> list[str]:
    """All files of a checkpoint but its manifest, as sorted relative paths with forward slashes."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MANIFEST)


def measure(path: Path) -> FileEntry:
    """Size and checksum of a file, read in pieces."""
    size = checksum = 0
    with path.open("rb") as file:
        while piece := file.read(2**22):
            size += len(piece)
            checksum = zlib.crc32(piece, checksum)
    return FileEntry(size_bytes=size, crc32=checksum)


def flush_to_disk(path: Path) -> None:
    """Makes a file's content, or a folder's list of names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Writes a text file and waits until the disk has it."""
    path.write_text(text, encoding="utf-8")
    flush_to_disk(path)


def problem_with(folder: Path) -> str | None:
    """Why a checkpoint cannot be used, or None. Checks every size, and the content of small files."""
    try:
        manifest = Manifest.load(folder / MANIFEST)
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so its save never ended"
    except (OSError, ValidationError, UnicodeDecodeError):
        return f"its {MANIFEST} cannot be read"
    problem = _problem_of_manifest(folder, manifest)
    for name, entry in manifest.files.items():
        problem = problem or _problem_of_file(folder / name, name, entry)
    return problem


def _problem_of_manifest(folder: Path, manifest: Manifest) -> str | None:
    if manifest.schema_version != _VERSION:
        return f"its {MANIFEST} is of version {manifest.schema_version}, and this program reads {_VERSION}"
    named = _STEP.fullmatch(folder.name)
    if named and int(named[1]) != manifest.step:
        return f"its {MANIFEST} is of step {manifest.step}, so the folder was renamed or copied"
    unlisted = [name for name in _NEEDED if name not in manifest.files]
    return f"its {MANIFEST} does not list {unlisted[0]}" if unlisted else None


def _problem_of_file(path: Path, name: str, entry: FileEntry) -> str | None:
    if not path.is_file():
        return f"{name} is missing"
    size = path.stat().st_size
    if size != entry.size_bytes:
        return f"{name} has {size} bytes and should have {entry.size_bytes}"
    if size <= _CHECKED_BYTES and measure(path) != entry:
        return f"the content of {name} is not what was saved"
    return None


def latest_complete(root: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest usable checkpoint; None if there was never one. Broken ones are passed over with a warning that names them.

    Raises InputError if there are checkpoints and none is usable: starting afresh would hide that.
    """
    broken = []
    for _, folder in reversed(published(root)):
        problem = problem_with(folder)
        if problem is None:
            return folder
        broken.append(f"{folder}: {problem}")
        warn(f"checkpoint {folder} is passed over: {problem}")
    if broken:
        raise InputError(
            "run_dir: none of its checkpoints is complete, and a fresh start would hide that. "
            "Restore one, or choose another run_dir:\n  " + "\n  ".join(broken)
        )
    return None
