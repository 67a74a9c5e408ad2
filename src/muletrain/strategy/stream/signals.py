"""Signals between the workers of a box: numbers in shared host memory that only grow.

On a GPU, writing and waiting are operations of a stream (cuStreamWriteValue32, cuStreamWaitValue32 of the CUDA driver): the
host is not needed, a stream that waits costs nothing, and other streams go on. The write has the driver's default memory
barrier before it, so that what was copied on the stream before is in host memory when the number is. A wait ends at any
number that is not smaller. On a CPU the waiting thread polls. Rejected: events shared between processes
(cudaIpcEventHandle), which a process must not wait for before the other has recorded them, so that a second way to say so
would be needed.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from muletrain.metrics.communication import CommunicationMeter
from muletrain.spec.errors import InputError, WorkerFailedError
from muletrain.strategy.stream.shared import Team

_GEQ: Final = 0
"""CU_STREAM_WAIT_VALUE_GEQ."""
_BARRIER_BEFORE: Final = 0
"""CU_STREAM_WRITE_VALUE_DEFAULT."""
_PATIENCE_S: Final = 600.0
"""A peer may compile, or be short of processor time; one that is gone is noticed at once."""
_SHORT_S: Final = 1e-3


class Signals(Protocol):
    """Writes and awaits numbers by their place in the shared flags."""

    def write(self, place: int, value: int) -> None:
        """After all that this thread, or the current stream, has done before."""

    def wait(self, place: int, value: int) -> None:
        """Lets nothing further happen on this thread, or the current stream, before the number is `value` or more."""


class HostSignals:
    """On a CPU."""

    def __init__(self, flags: Tensor, team: Team, meter: CommunicationMeter) -> None:
        self._flags, self._team, self._meter = flags.numpy(), team, meter

    def write(self, place: int, value: int) -> None:
        """See Signals."""
        self._flags[place] = value

    def wait(self, place: int, value: int) -> None:
        """See Signals. Raises WorkerFailedError if a worker has stopped, or after ten minutes."""
        if self._flags[place] >= value:
            self._team.require_all()
            return
        with self._meter.wait():
            start, pause_s = time.monotonic(), 0.0
            while self._flags[place] < value:
                self._team.require_all()
                time.sleep(pause_s)
                pause_s = min(_SHORT_S, pause_s + 2e-5)
                if time.monotonic() - start > _PATIENCE_S:
                    raise WorkerFailedError(
                        f"another worker has not come along for {_PATIENCE_S:.0f} s in the middle of a step"
                    )
        self._team.require_all()


class StreamSignals:
    """On a CUDA device; `flags` must be registered with it."""

    def __init__(self, flags: Tensor) -> None:
        """Raises InputError where the driver lacks the operations."""
        self._driver: Any = ctypes.CDLL("libcuda.so.1")
        try:
            self._write, self._wait = self._driver.cuStreamWriteValue32_v2, self._driver.cuStreamWaitValue32_v2
        except AttributeError as error:
            raise InputError(
                "parallel.workers: several workers under memory.strategy: streamed need a driver of CUDA 11.7 or newer (stream "
                "memory operations); update it, or use parallel.workers: 1"
            ) from error
        for function in (self._write, self._wait):
            function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
        address = ctypes.c_uint64()
        find = self._driver.cuMemHostGetDevicePointer_v2
        find.argtypes = (ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p, ctypes.c_uint)
        self._require(find(ctypes.byref(address), flags.data_ptr(), 0), "cuMemHostGetDevicePointer")
        self._address = address.value

    def write(self, place: int, value: int) -> None:
        """See Signals."""
        code = self._write(torch.cuda.current_stream().cuda_stream, self._address + 4 * place, value, _BARRIER_BEFORE)
        self._require(code, "cuStreamWriteValue32")

    def wait(self, place: int, value: int) -> None:
        """See Signals."""
        code = self._wait(torch.cuda.current_stream().cuda_stream, self._address + 4 * place, value, _GEQ)
        self._require(code, "cuStreamWaitValue32")

    @staticmethod
    def _require(code: int, name: str) -> None:
        if code:
            raise WorkerFailedError(f"{name} failed with error {code} of the CUDA driver")
