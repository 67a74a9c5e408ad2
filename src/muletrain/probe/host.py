"""Host memory and disks: how fast they copy, write and read, without a device.

Copies go through numpy, which lets other threads run meanwhile. A disk is read after the kernel was told to forget the file,
and written until the device says that it has it; on a network file system both are what they are.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from muletrain.probe.timing import Effort, rate, sample, seconds
from muletrain.spec.errors import InputError
from muletrain.spec.machine import DiskRates, HostCopy

_CHUNK = 2**24


def host_copy(cores: int, size_bytes: int, effort: Effort) -> tuple[HostCopy, ...]:
    """With 1, 2, 4, … and all `cores` threads, each copying its part of `size_bytes`."""
    source, target = (np.ones(size_bytes, dtype=np.uint8) for _ in range(2))
    found = []
    for threads in sorted({*(2**power for power in range(cores.bit_length()) if 2**power <= cores), cores}):
        parts = [slice(size_bytes * n // threads, size_bytes * (n + 1) // threads) for n in range(threads)]
        with ThreadPoolExecutor(threads) as pool:

            def copy(pool: ThreadPoolExecutor = pool, parts: list[slice] = parts) -> None:
                list(pool.map(lambda part: np.copyto(target[part], source[part]), parts))

            took = seconds(copy, torch.device("cpu"), effort)
        found.append(HostCopy(threads=threads, bytes_s=rate(size_bytes, took)))
    return tuple(found)


def disk(folder: Path, size_bytes: int, repeats: int) -> DiskRates:
    """Of a file in `folder`, which must exist. Raises InputError where nothing can be written there."""
    free = shutil.disk_usage(folder).free
    if free < 2 * size_bytes:
        raise InputError(f"{folder}: {free // 2**20} MiB are free, {2 * size_bytes // 2**20} are needed to measure; free some")
    chunk = np.random.default_rng(0).bytes(_CHUNK)
    writes, reads = [], []
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as file:
            for _ in range(repeats):
                writes.append(_write(file.fileno(), chunk, size_bytes))
                reads.append(_read(file.fileno(), size_bytes))
    except OSError as error:
        raise InputError(f"{folder}: cannot be measured ({error.strerror}); name a folder that can be written") from None
    return DiskRates(
        folder=str(folder), write_bytes_s=rate(size_bytes, sample(writes)), read_bytes_s=rate(size_bytes, sample(reads))
    )


def distinct(folders: Iterable[Path]) -> list[Path]:
    """The nearest folder that exists of each, one a file system."""
    found: dict[int, Path] = {}
    for folder in folders:
        there = next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
        found.setdefault(there.stat().st_dev, there.absolute())
    return list(found.values())


def _write(file: int, chunk: bytes, size_bytes: int) -> float:
    os.ftruncate(file, 0)
    os.lseek(file, 0, os.SEEK_SET)
    start = time.perf_counter()
    for _ in range(size_bytes // len(chunk)):
        os.write(file, chunk)
    os.fsync(file)
    return time.perf_counter() - start


def _read(file: int, size_bytes: int) -> float:
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(file, 0, os.SEEK_SET)
    room = bytearray(_CHUNK)
    start = time.perf_counter()
    left = size_bytes
    while left > 0:
        left -= os.readv(file, [room])
    return time.perf_counter() - start
