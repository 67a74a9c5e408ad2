"""Communication: how long a worker stands still for the others (exposed), and how much transfer hides behind compute.

On a CPU (gloo) a collective is waited for on the host, so the host clock around the wait is the exposed time; what ran beside
compute cannot be seen from there and stays "not measured" (None), never 0. On a GPU the host only enqueues, so both numbers
come from the device timeline: intervals of compute kernels and of NCCL kernels, from torch.profiler over a few steps.
Rejected: CUDA events around collectives (they measure queueing on the stream, not whether compute stood still), and
subtracting a run without communication (a different run).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Interval = tuple[float, float]
"""(start, end) in one unit, start <= end."""


class CommunicationMeter:
    """Adds up one worker's exposed waits on the host clock. A wait inside a wait counts once."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._depth = 0

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Times the enclosed collective or wait; also when it raises."""
        self._depth += 1
        start = time.perf_counter()
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._seconds += time.perf_counter() - start

    def take(self) -> float:
        """Seconds of exposed wait since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def exposed_and_overlapped(compute: Iterable[Interval], communication: Iterable[Interval]) -> tuple[float, float]:
    """(communication time with no compute beside it, communication time with), in the unit of the intervals."""
    busy, sent = union(compute), union(communication)
    total = sum(end - start for start, end in sent)
    overlapped, at = 0.0, 0
    for start, end in sent:
        while at < len(busy) and busy[at][1] <= start:
            at += 1
        ahead = at
        while ahead < len(busy) and busy[ahead][0] < end:
            overlapped += min(end, busy[ahead][1]) - max(start, busy[ahead][0])
            ahead += 1
    return total - overlapped, overlapped


def device_intervals(events: Iterable[Any], *, copies: bool = False) -> tuple[list[Interval], list[Interval]]:
    """(compute, communication) intervals in seconds from torch.profiler's `events()`: device work only, NCCL's by its name.

    `copies`: what workers exchange goes through host memory, so copies between host and device are communication.
    """
    compute: list[Interval] = []
    communication: list[Interval] = []
    for event in events:
        if not str(event.device_type).endswith("CUDA"):
            continue
        interval = (event.time_range.start * 1e-6, event.time_range.end * 1e-6)
        name = event.name.lower()
        between = "nccl" in name or (copies and ("memcpy htod" in name or "memcpy dtoh" in name))
        (communication if between else compute).append(interval)
    return compute, communication
