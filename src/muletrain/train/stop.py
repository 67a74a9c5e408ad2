"""Stopping well: a signal to any worker, at any moment, becomes one decision of all workers at the next step's end.

The handler only sets a flag. The flag travels in the one small sum that closes each step, so it costs no collective of its
own, and with it what the loop needs to know of the others. Rejected: saving from the handler (the others are in a collective).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist

from muletrain.metrics.communication import CommunicationMeter


class StopFlag:
    """Whether this worker was asked to stop."""

    def __init__(self) -> None:
        self.raised = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While active, SIGTERM and SIGINT raise the flag; a second SIGINT interrupts at once.

        A SIGINT that is ignored stays so: our launcher's workers leave the terminal's Ctrl-C to it. Before this, while loading,
        there is nothing to save and a signal simply ends the worker.
        """
        numbers = [signal.SIGTERM]
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            numbers.append(signal.SIGINT)
        previous = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.raised and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.raised = True


@dataclass(frozen=True)
class Shared:
    """What all workers know after a step."""

    stop: bool
    padding_tokens: int
    memory_bytes: int
    """Of the worker with the most."""


def exchange(stop: bool, padding_tokens: int, memory_bytes: int, meter: CommunicationMeter) -> Shared:
    """One small sum over the workers, on the host. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Shared(stop, padding_tokens, memory_bytes)
    values = torch.zeros(2 + dist.get_world_size(), dtype=torch.int64)
    values[0], values[1], values[2 + dist.get_rank()] = int(stop), padding_tokens, memory_bytes
    with meter.wait():
        dist.all_reduce(values)
    return Shared(bool(values[0] > 0), int(values[1]), int(values[2:].max()))
