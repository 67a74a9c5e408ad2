"""Host copies and disks: what is counted, where a file may go, what is said where it cannot."""

from __future__ import annotations

import os
from collections import namedtuple
from pathlib import Path

import pytest

from muletrain.probe import host
from muletrain.probe.host import disk, distinct, host_copy
from muletrain.probe.timing import Effort
from muletrain.spec.errors import InputError

QUICK = Effort(sample_s=0.002, samples=3, warm_s=0.002)
MIB = 2**20


def test_copies_are_tried_with_powers_of_two_and_all_threads() -> None:
    found = host_copy(3, MIB, QUICK)
    assert [copy.threads for copy in found] == [1, 2, 3]
    assert all(1e7 < copy.bytes_s.median < 1e13 for copy in found)


def test_a_disk_is_written_and_read_and_left_as_it_was(tmp_path: Path) -> None:
    found = disk(tmp_path, 32 * MIB, 2)
    assert found.folder == str(tmp_path) and found.write_bytes_s.n == found.read_bytes_s.n == 2
    assert found.write_bytes_s.low > 1e5 and found.read_bytes_s.low > 1e5
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(host.shutil, "disk_usage", lambda folder: usage(9, 9, 3 * MIB))
    with pytest.raises(InputError, match="3 MiB are free, 64 are needed to measure; free some"):
        disk(tmp_path, 32 * MIB, 1)


def test_a_folder_that_takes_no_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr(host.tempfile, "NamedTemporaryFile", refuse)
    with pytest.raises(InputError, match=r"cannot be measured \(Read-only file system\); name a folder that can be written"):
        disk(tmp_path, MIB, 1)


def test_folders_of_one_file_system_count_once_and_need_not_exist_yet(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert distinct([tmp_path / "a" / "not" / "yet", tmp_path]) == [tmp_path / "a"]
