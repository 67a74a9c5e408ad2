"""Times a piece of work on a device: by the device's own clock on a GPU, by the host's elsewhere.

A sample is the time of one call among several in a row, so what a call costs the host shows only where it is longer than the
work itself, as in training. The first calls do not count: they load kernels, choose among them and bring the clocks up. A GPU
rests as long as it works: a card that is limited by power slows down under work without a pause, which is measured apart
(compute.sustained), since whether a step leaves pauses is for its plan to say.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from muletrain.spec.machine import Sample


@dataclass(frozen=True)
class Effort:
    """How long each measurement may take."""

    sample_s: float = 0.02
    """A sample is as many calls in a row as take this long."""
    samples: int = 7
    warm_s: float = 0.05
    rest: float = 1.0
    """Seconds of rest for each of work between samples on a GPU."""


def seconds(work: Callable[[], object], device: torch.device, effort: Effort) -> Sample:
    """Seconds of one call of `work`, which enqueues on the current stream of `device`."""
    work()
    once = timed(work, device, 1)
    warm_calls = max(1, min(1000, int(effort.warm_s / max(once, 1e-6))))
    once = timed(work, device, warm_calls)
    calls = max(1, min(1000, int(effort.sample_s / max(once, 1e-6))))
    times = []
    for _ in range(effort.samples):
        if device.type == "cuda":
            time.sleep(effort.rest * calls * once)
        times.append(timed(work, device, calls))
    return sample(times)


def rate(amount: float, took: Sample) -> Sample:
    """What a second does, of work whose single call does `amount`."""
    return Sample(median=amount / took.median, low=amount / took.high, high=amount / took.low, n=took.n)


def sample(values: Sequence[float]) -> Sample:
    """Of at least one value."""
    return Sample(median=statistics.median(values), low=min(values), high=max(values), n=len(values))


def timed(work: Callable[[], object], device: torch.device, calls: int) -> float:
    """Seconds a call, of `calls` in a row."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - start) / calls
    with torch.cuda.device(device):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(calls):
            work()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3 / calls
