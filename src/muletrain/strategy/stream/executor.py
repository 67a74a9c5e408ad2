"""Executes a Schedule: ops in the schedule's order on each resource, each after those it names.

On a GPU a resource is a stream and the host only enqueues; on a CPU it can be a thread of its own, with seeded random delays,
so that a missing dependency shows as a wrong result in a test before it becomes a race on a GPU. `InOrder` runs the list as it
stands, in the calling thread: what a CPU run does by default, since more threads would not make it faster.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

from muletrain.schedule.ops import Op, Resource, Schedule
from muletrain.schedule.program import RESOURCES

Handler = Callable[[Op], None]


class Executor(Protocol):
    """Runs schedules."""

    def run(self, schedule: Schedule, handler: Handler) -> None:
        """Calls `handler` for each op where and when the schedule says."""


class InOrder:
    """All ops in list order, here and now."""

    def run(self, schedule: Schedule, handler: Handler) -> None:
        """See Executor."""
        for op in schedule.ops:
            handler(op)


class Streams:
    """A CUDA stream a resource. Returns when everything is enqueued; `host` ops wait for what they need."""

    def __init__(self, device: torch.device) -> None:
        self._streams: dict[Resource, torch.cuda.Stream] = {"compute": torch.cuda.current_stream(device)}
        self._streams["host"] = self._streams["compute"]
        for resource in RESOURCES:
            if resource not in self._streams:
                # First in the queue: their kernels are short, and compute's follow each other densely.
                self._streams[resource] = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.traced: list[tuple[Op, torch.cuda.Event, torch.cuda.Event]] | None = None
        """Start and end of each op on its stream, if set to a list before a run."""

    def stream(self, resource: Resource) -> torch.cuda.Stream:
        """The stream of a resource."""
        return self._streams[resource]

    def run(self, schedule: Schedule, handler: Handler) -> None:
        """See Executor."""
        awaited = {number for op in schedule.ops for number in op.after}
        events: dict[int, torch.cuda.Event] = {}
        start = torch.cuda.Event()
        start.record(self._streams["compute"])  # what the caller enqueued before comes before everything here
        for stream in self._streams.values():
            stream.wait_event(start)
        for op in schedule.ops:
            stream = self._streams[op.resource]
            for number in op.after:
                stream.wait_event(events[number])
            with torch.cuda.stream(stream):
                self._traced(op, handler, stream) if self.traced is not None else handler(op)
            if op.id in awaited:
                event = torch.cuda.Event()
                event.record(stream)
                events[op.id] = event
        for stream in self._streams.values():
            if stream is not self._streams["compute"]:
                self._streams["compute"].wait_stream(stream)

    def _traced(self, op: Op, handler: Handler, stream: torch.cuda.Stream) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        handler(op)
        end.record(stream)
        assert self.traced is not None
        self.traced.append((op, start, end))


class Threads:
    """A thread a resource, with random delays up to `delay_s` before each op: finds dependencies that a schedule lacks."""

    def __init__(self, seed: int, delay_s: float) -> None:
        self._seed, self._delay_s = seed, delay_s

    def run(self, schedule: Schedule, handler: Handler) -> None:
        """See Executor. The first exception in any thread is raised here, after all have stopped."""
        done = {op.id: threading.Event() for op in schedule.ops}
        failed: list[BaseException] = []

        def work(resource: Resource) -> None:
            delays = random.Random(f"{self._seed} {resource}")
            for op in schedule.ops:
                if op.resource != resource:
                    continue
                for number in op.after:
                    while not done[number].wait(0.05):
                        if failed:
                            return
                time.sleep(delays.random() ** 4 * self._delay_s)
                if failed:
                    return
                try:
                    handler(op)
                except BaseException as error:
                    failed.append(error)
                    return
                done[op.id].set()

        threads = [threading.Thread(target=work, args=(resource,)) for resource in RESOURCES]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
