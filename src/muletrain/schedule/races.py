"""Proves that the workers of a box, each running its own schedules, never meet in host memory.

Like `check`, but over all workers and several steps: an op of one worker happens before an op of another only where a
signal and the wait for it say so, where both workers decide, or where a flush has ended everywhere. Any two ops that touch
the same host memory, one of them writing, must be ordered; and a reader must find what it expects. The signals' and waits'
own buffers, which stand for what the other workers do, count for nothing here: those ops are looked at themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muletrain.schedule.check import describe, is_meant_for
from muletrain.schedule.ops import Buffer, Op, Schedule, ScheduleError
from muletrain.schedule.program import NUMBER, RESOURCES

_SHARED = frozenset({"host_parameters", "host_state", "host_gradient", "ring"})
_Clock = tuple[int, ...]
"""By (worker, resource): how many of its ops are complete."""
_Signal = tuple[int, int, int, int, int]
"""(step, phase, worker, unit, wave)."""


@dataclass(frozen=True)
class _Done:
    """An op of a worker, and what is complete when it is."""

    worker: int
    op: Op
    place: int
    """Its (worker, resource) in clocks."""
    count: int
    clock: _Clock

    def before(self, later: _Clock) -> bool:
        """Whether it is complete where `later` is."""
        return later[self.place] >= self.count

    def __str__(self) -> str:
        return f"worker {self.worker}'s {describe(self.op)}"


def check_workers(steps: Sequence[Sequence[Schedule]]) -> None:
    """Proves `steps`, one after the other; each holds the schedules of all workers, by worker.

    Raises ScheduleError naming the ops at fault, or the op of each worker at which all would wait for ever.
    """
    proof = _Proof(len(steps[0]))
    for schedules in steps:
        proof.step(schedules)


class _Proof:
    def __init__(self, workers: int) -> None:
        self._workers = range(workers)
        self._zero: _Clock = (0,) * (workers * len(RESOURCES))
        self._last = [[self._zero] * len(RESOURCES) for _ in self._workers]
        self._counts = list(self._zero)
        self._signals: dict[_Signal, _Clock] = {}
        self._writer: dict[Buffer, _Done] = {}
        self._readers: dict[Buffer, list[_Done]] = {}
        self._step = -1

    def step(self, schedules: Sequence[Schedule]) -> None:
        """All ops, in an order in which each worker keeps its list's; then the workers have met."""
        self._step += 1
        at, done = [0] * len(schedules), [dict[int, _Clock]() for _ in schedules]
        while any(at[w] < len(schedules[w].ops) for w in self._workers):
            able = [w for w in self._workers if at[w] < len(schedules[w].ops) and self._can_run(schedules[w].ops[at[w]])]
            if not able:
                stuck = [f"worker {w}'s {describe(s.ops[at[w]])}" for w, s in enumerate(schedules) if at[w] < len(s.ops)]
                raise ScheduleError("workers wait for each other: " + ", ".join(stuck))
            for w in able:
                self._run(w, schedules[w].ops[at[w]], done[w])
                at[w] += 1
        ends = [_join(*self._last[w]) for w in self._workers]
        if schedules[0].step.mode != "evaluate":  # every worker decides with the others, and ends a flush with them
            ends = [_join(*ends)] * len(ends)
        self._last = [[end] * len(RESOURCES) for end in ends]

    def _awaited(self, op: Op) -> list[_Signal]:
        flags = [buffer.index for buffer in op.reads if buffer.place == "flag"]
        return [(self._step, phase, worker, unit, op.wave) for phase, worker, unit in flags]

    def _can_run(self, op: Op) -> bool:
        return op.kind != "wait" or all(signal in self._signals for signal in self._awaited(op))

    def _run(self, worker: int, op: Op, clocks: dict[int, _Clock]) -> None:
        resource = NUMBER[op.resource]
        place = worker * len(RESOURCES) + resource
        known = [self._last[worker][resource], *(clocks[earlier] for earlier in op.after)]
        if op.kind == "wait":
            known += [self._signals[signal] for signal in self._awaited(op)]
        clock = _join(*known)
        self._counts[place] += 1
        after = (*clock[:place], self._counts[place], *clock[place + 1 :])
        clocks[op.id] = self._last[worker][resource] = after
        if op.kind == "signal":
            phase, me, unit = op.writes[-1].index
            self._signals[self._step, phase, me, unit, op.wave] = after
        elif op.kind != "wait":
            self._touch(_Done(worker, op, place, self._counts[place], after), clock)

    def _touch(self, done: _Done, clock: _Clock) -> None:
        for buffer in done.op.reads:
            if buffer.place in _SHARED:
                source = self._writer.get(buffer)
                if source is not None and not source.before(clock):
                    raise ScheduleError(f"{done} reads {buffer.place}{list(buffer.index)} without waiting for {source}")
                if source is not None and not is_meant_for(source.op, buffer, done.op):
                    raise ScheduleError(f"{done} reads {buffer.place}{list(buffer.index)}, overwritten by {source}")
                self._readers.setdefault(buffer, []).append(done)
        for buffer in done.op.writes:
            if buffer.place in _SHARED:
                for other in (*self._readers.get(buffer, ()), *([self._writer[buffer]] if buffer in self._writer else ())):
                    if other.op is not done.op and not other.before(clock):
                        raise ScheduleError(f"{done} writes {buffer.place}{list(buffer.index)} without waiting for {other}")
                self._writer[buffer], self._readers[buffer] = done, []


def _join(*clocks: _Clock) -> _Clock:
    return tuple(map(max, *clocks)) if len(clocks) > 1 else clocks[0]
