"""FSDP2's collectives with the host's waits timed: on gloo the host stands still for them, so its clock sees them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from muletrain.metrics.communication import CommunicationMeter


class _TimedWork:
    """A collective under way whose wait is timed."""

    def __init__(self, work: dist.Work, meter: CommunicationMeter) -> None:
        self._work, self._meter = work, meter

    def wait(self, *args: Any) -> bool:
        with self._meter.wait():
            return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _Timed:
    """Placed before one of FSDP2's collectives: times what the host waits in it, and for what it started."""

    def __init__(self, meter: CommunicationMeter) -> None:
        super().__init__()
        self._meter = meter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._meter.wait():
            work = super().__call__(*args, **kwargs)  # type: ignore[misc]
        return work if work is None else _TimedWork(work, self._meter)


class TimedAllGather(_Timed, DefaultAllGather):
    """Gathers a block's parameters."""


class TimedReduceScatter(_Timed, DefaultReduceScatter):
    """Sums a block's gradients over workers, each keeping its shard."""
