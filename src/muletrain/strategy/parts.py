"""Where a step's time went: host clock on a CPU, stream events on a GPU (read only after the step's one host wait)."""

from __future__ import annotations

import time

import torch

from muletrain.metrics.communication import CommunicationMeter


class StepParts:
    """Marks the ends of a step's parts in order. On a CPU, exposed waits are taken out of the part they fell in."""

    def __init__(self, device: torch.device, meter: CommunicationMeter) -> None:
        self._cuda, self._meter = device.type == "cuda", meter
        self._names: list[str] = []
        self._marks: list[float | torch.cuda.Event] = []
        self._waits: list[float] = []
        meter.take()
        self._marks.append(self._now())

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self, name: str) -> None:
        """The part since the last mark was `name`."""
        self._names.append(name)
        self._marks.append(self._now())
        self._waits.append(self._meter.take())

    def seconds(self) -> dict[str, float]:
        """Seconds by part; "communication" is the exposed wait of all parts, absent where the host clock cannot see it."""
        parts: dict[str, float] = {}
        for name, start, end, wait in zip(self._names, self._marks, self._marks[1:], self._waits, strict=False):
            if isinstance(start, float) and isinstance(end, float):
                spent = end - start - wait
            else:
                end.synchronize()  # type: ignore[union-attr]
                spent = start.elapsed_time(end) / 1e3  # type: ignore[union-attr, arg-type]
            parts[name] = parts.get(name, 0.0) + spent
        if not self._cuda:
            parts["communication"] = sum(self._waits)
        return parts
