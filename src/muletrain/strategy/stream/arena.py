"""Host memory of a streamed run: one mapping, registered with the driver, from which all arrays are cut.

One mapping, because several workers of a box share it (shared.py), and because PyTorch's pinned allocator rounds each
tensor up to a power of two: 70 GiB of state would take 128. Pages are touched by several threads first, since the driver
would otherwise fault them in one by one while it registers them.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from muletrain.spec.errors import DoesNotFitError
from muletrain.spec.units import format_bytes

_ALIGNMENT = 4096
_TOUCH = 1 << 30
_MEMINFO = Path("/proc/meminfo")


class HostArena:
    """`take` cuts arrays off one mapping until it is used up; `close` gives the whole back."""

    def __init__(self, size_bytes: int, register: bool, file: int = -1) -> None:
        """Maps `size_bytes`, zeroed. `register`: pin it for a CUDA device, so that copies run beside compute. `file`: the
        descriptor of a memory file of at least that size to map, for which there is known to be room.

        Raises DoesNotFitError with the shortfall before anything is mapped, or where the driver refuses to register it.
        """
        self._size = -(-max(size_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
        if file < 0:
            require_free(self._size)
        self._map = mmap.mmap(file, self._size)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._used, self._registered = 0, False
        if register:
            self.touch()
            self.register()

    def touch(self) -> None:
        """Has the kernel provide all pages, several at a time; they are zero afterwards."""
        touched = np.frombuffer(self._map, dtype=np.uint8)
        starts = range(0, self._size, _TOUCH)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(lambda start: touched[start : start + _TOUCH : _ALIGNMENT].fill(0), starts))

    def register(self) -> None:
        """Pins the memory for the current CUDA device. Raises DoesNotFitError where the driver refuses."""
        code = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self._size, 0)
        if int(code) != 0:
            raise DoesNotFitError(
                f"memory.strategy: the driver would not pin {format_bytes(self._size)} of host memory (cudaHostRegister: error "
                f"{int(code)}); a container may limit locked memory (ulimit -l)"
            )
        self._registered = True

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """A zeroed array of `count` elements, aligned to a page."""
        size = count * dtype.itemsize
        array = self._bytes[self._used : self._used + size]
        if len(array) < size:
            raise ValueError(f"the arena has {self._size - self._used} bytes left, {size} asked for")
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return array.view(dtype)

    def close(self) -> None:
        """Gives the memory back to the driver. Arrays cut from it stay valid as ordinary memory until they are dropped."""
        if self._registered:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
            self._registered = False


def require_free(size_bytes: int) -> None:
    """Raises DoesNotFitError with the shortfall."""
    missing = size_bytes - available_bytes()
    if missing > 0:
        raise DoesNotFitError(
            f"memory.strategy: streamed keeps {format_bytes(size_bytes)} in host memory, {format_bytes(missing)} more than "
            "is free on this machine; free some, or choose a smaller model or train.optimizer.state: 8bit"
        )


def padded_bytes(count: int, dtype: torch.dtype) -> int:
    """What `take` uses of an arena."""
    return -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def available_bytes() -> int:
    """Host memory that can be had without swapping, as the kernel estimates it."""
    for line in _MEMINFO.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
