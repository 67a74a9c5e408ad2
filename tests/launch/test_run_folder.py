"""The run folder's files and lock. What a whole command makes of a bad folder is in tests/cli/test_train.py."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest

from muletrain.launch.run_folder import locked, prepare_run_folder, space_warning, write_atomically
from muletrain.spec.errors import InputError
from tests.train.tiny import make_plan


def test_a_file_is_old_or_new_never_half(tmp_path, monkeypatch):
    file = tmp_path / "plan.json"
    write_atomically(file, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(file, "new, and much longer")
    assert file.read_text() == "old"
    assert [child.name for child in tmp_path.iterdir()] == ["plan.json"]
    monkeypatch.undo()
    write_atomically(file, "new")
    assert file.read_text() == "new"
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_disk_without_locks_is_named(tmp_path, monkeypatch):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with (
        pytest.raises(InputError, match=r"cannot be locked \(No locks available\); choose a folder on a local disk"),
        locked(tmp_path),
    ):
        pass


def test_the_lock_is_free_after_use(tmp_path):
    for _ in range(2):
        with locked(tmp_path):
            assert f"process {os.getpid()}" in (tmp_path / ".lock").read_text()


def test_space_is_counted_for_all_kept_checkpoints_and_the_one_being_written(materials, tmp_path, monkeypatch):
    from types import SimpleNamespace

    from muletrain.launch import run_folder

    plan = make_plan(materials, tmp_path, keep=2, model_dtype="bf16")
    need = 3 * plan.model.shape.parameters * (3 * 4 + 2)
    for free, expected in ((need, None), (need - 1, "saving will fail")):
        monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        warning = space_warning(tmp_path, plan)
        assert warning is None if expected is None else expected in warning


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda run: (run / "checkpoints").write_text("x"), "checkpoints is no folder, and a run writes its own there"),
        (lambda run: (run / "checkpoints").symlink_to(run / "gone"), "checkpoints is no folder"),
        (lambda run: (run / "events.jsonl").mkdir(), "events.jsonl is a folder, and a run writes its own there; move it away"),
        (lambda run: (run / "record.json").mkdir(), "record.json is a folder"),
        (lambda run: (run / "plan.json").mkdir(), "plan.json is a folder"),
    ],
)
def test_C08_what_is_in_the_way_is_found_before_training(tmp_path, make, words):
    make(tmp_path)
    with pytest.raises(InputError, match=words):
        prepare_run_folder(tmp_path, "auto")
