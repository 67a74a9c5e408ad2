"""Walks a schedule with rates: when each op starts and ends, and so how long a step takes and what it waits for.

How long an op takes alone is said in rates.py. Event-driven: each resource does its ops one after another, an op starts when
its resource is free and all in `after` are done. The two directions of the link share it when both are busy, and so do two
resources that go the same way. Of several workers in a box one is walked, and the others are taken to keep pace: what it waits
for, they tell it when it tells them. What is not modelled: that the update's memory traffic slows compute (under 2 % of it on
the cards at hand), and what the host does between steps: a step starts when the one before is complete.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from muletrain.schedule.build import build
from muletrain.schedule.ops import Op, Resource, Schedule, ScheduleError, StepShape, StreamPlan
from muletrain.schedule.program import NUMBER, RESOURCES
from muletrain.schedule.rates import Rates, alone_s

_UP: Final = NUMBER["up"]
_DOWN: Final = NUMBER["down"]
_PEERS: Final = NUMBER["peers"]
_SUMS: Final = NUMBER["sums"]


@dataclass(frozen=True)
class Timeline:
    """When things happen, in seconds from the start of the step."""

    start: tuple[float, ...]
    """By op."""
    end: tuple[float, ...]
    step_s: float
    busy_s: dict[Resource, float]
    """Time with an op running."""
    exposed_s: float
    """Time that compute stands idle, waiting for anything else."""
    tokens: int
    bound_s: float
    """What no order of these ops can beat: each resource's own work without overhead, compute and the link included."""

    @property
    def tokens_per_s(self) -> float:
        """Positions of the step over its time."""
        return self.tokens / self.step_s if self.step_s else 0.0


def simulate(schedule: Schedule, rates: Rates) -> Timeline:
    """The timeline of `schedule` at `rates`. Raises ScheduleError if the ops wait for each other in a circle."""
    alone = [alone_s(op, schedule, rates) for op in schedule.ops]
    start, end = _walk(schedule, alone, rates)
    busy: dict[Resource, float] = dict.fromkeys(RESOURCES, 0.0)
    for op, s, e in zip(schedule.ops, start, end, strict=True):
        busy[op.resource] += e - s
    step_s = max(end, default=0.0)
    return Timeline(
        start=tuple(start),
        end=tuple(end),
        step_s=step_s,
        busy_s=busy,
        exposed_s=step_s - busy["compute"],
        tokens=sum(schedule.step.micro_batches),
        bound_s=_bound(schedule, alone, rates),
    )


def simulate_steady(plan: StreamPlan, step: StepShape, rates: Rates) -> Timeline:
    """One step among many: the updates of the step before fall into it."""
    pending = step.mode == "train" and plan.update == "next_fetch" and any(unit.trainable for unit in plan.units)
    return simulate(build(plan, step.model_copy(update={"pending": pending})), rates)


def _slowdown(rates: Rates) -> float:
    """By how much both directions get slower when both are busy, at least 1."""
    return max(1.0, (rates.up_bytes_s + rates.down_bytes_s) / rates.both_bytes_s)


def _bound(schedule: Schedule, alone: list[float], rates: Rates) -> float:
    total: dict[Resource, float] = dict.fromkeys(RESOURCES, 0.0)
    for op in schedule.ops:
        total[op.resource] += alone[op.id]
    link_s = link_bound_s(total["up"] + total["peers"], total["down"] + total["sums"], rates)
    return max(total["compute"], total["update"], link_s)


def link_bound_s(up_s: float, down_s: float, rates: Rates) -> float:
    """The least time in which the link moves what takes `up_s` and `down_s` alone: both until the shorter is through, then
    the rest alone; or one after the other, where going together gains nothing."""
    short, long = sorted((up_s, down_s))
    return min(short * _slowdown(rates) + long - short, short + long)


def _walk(schedule: Schedule, alone: list[float], rates: Rates) -> tuple[list[float], list[float]]:
    """Start and end by op. Work is in seconds alone; a link op's work shrinks slower while the other direction is busy."""
    ops = schedule.ops
    count = len(ops)
    told = _told(ops)
    after = [_waits_for(op, told) for op in ops]
    waiting = [len(earlier) for earlier in after]
    then: list[list[int]] = [[] for _ in ops]
    queues: list[list[int]] = [[] for _ in RESOURCES]
    for op in ops:
        queues[NUMBER[op.resource]].append(op.id)
        for earlier in after[op.id]:
            then[earlier].append(op.id)
    start, end = [0.0] * count, [0.0] * count
    shared = 1.0 / _slowdown(rates)
    speed = [1.0] * len(RESOURCES)
    left = [math.inf] * len(RESOURCES)  # seconds of work of the op that runs; infinite: none runs
    heads = [0] * len(RESOURCES)
    now, done = 0.0, 0
    touched = range(len(RESOURCES))
    while True:
        for r in touched:
            if left[r] == math.inf and heads[r] < len(queues[r]) and waiting[queues[r][heads[r]]] == 0:
                op = ops[queues[r][heads[r]]]
                start[op.id] = now
                left[r] = alone[op.id] + rates.op_overhead_s
        up, down = ((left[a] < math.inf) + (left[b] < math.inf) for a, b in ((_UP, _PEERS), (_DOWN, _SUMS)))
        each = shared if up and down else 1.0
        speed[_UP] = speed[_PEERS] = each / max(1, up)
        speed[_DOWN] = speed[_SUMS] = each / max(1, down)
        passed, first = min((left[r] / speed[r], r) for r in touched)
        if passed == math.inf:
            break
        now += passed
        for r in touched:
            left[r] -= passed * speed[r]
        left[first] = math.inf
        finished = queues[first][heads[first]]
        heads[first] += 1
        end[finished] = now
        done += 1
        for follower in then[finished]:
            waiting[follower] -= 1
    if done < count:
        stuck = ops[min(q[h] for q, h in zip(queues, heads, strict=True) if h < len(q))]
        raise ScheduleError(f"op {stuck.id} {stuck.kind} waits for something that waits for it")
    return start, end


def _told(ops: tuple[Op, ...]) -> dict[tuple[int, int, int], int]:
    """(phase, unit, wave) -> the worker's own signal."""
    return {(op.writes[-1].index[0], op.unit, op.wave): op.id for op in ops if op.kind == "signal"}


def _waits_for(op: Op, told: dict[tuple[int, int, int], int]) -> tuple[int, ...]:
    """What must be complete before `op`, other workers keeping pace."""
    if op.kind != "wait":
        return op.after
    own = told.get((op.reads[0].index[0], op.unit, op.wave))
    return op.after if own is None else (*op.after, own)
