"""Several workers of a box: each schedule is sound for itself, and all of them side by side, over several steps."""

from __future__ import annotations

import dataclasses
import random

import pytest

from muletrain.schedule.build import build
from muletrain.schedule.check import check
from muletrain.schedule.ops import PHASES, Schedule, ScheduleError, StepShape, StreamPlan
from muletrain.schedule.races import check_workers
from tests.schedule.plans import plan, step, team_case, unit
from tests.schedule.test_check import fault


def modes(shape: StepShape) -> list[StepShape]:
    """Two training steps, a flush, an evaluation and one more step."""
    work = list(shape.micro_batches) or [5]
    return [
        step(*work),
        step(*work, pending=True),
        step(pending=True, mode="flush"),
        step(*work, mode="evaluate"),
        step(*work),
        step(*work, pending=True),
    ]


def schedules(plans: list[StreamPlan], shape: StepShape) -> list[list[Schedule]]:
    trainable = any(unit.trainable for unit in plans[0].units)
    kinds = [one if trainable else one.model_copy(update={"pending": False}) for one in modes(shape)]
    return [[build(plan, one) for plan in plans] for one in kinds if trainable or one.mode != "flush"]


@pytest.mark.parametrize("seed", range(150))
def test_workers_side_by_side_pass(seed: int) -> None:
    plans, shape = team_case(seed, workers=2 + seed % 3)
    steps = schedules(plans, shape)
    assert [fault(schedule) for side_by_side in steps for schedule in side_by_side] == [None] * (len(steps) * len(plans))
    assert check_workers(steps) is None


@pytest.mark.parametrize("seed", range(30))
def test_every_edge_of_every_worker_is_needed(seed: int) -> None:
    plans, shape = team_case(seed)
    for one in modes(shape)[1:3]:
        for mine in plans:
            schedule = build(mine, one)
            for op in schedule.ops:
                for edge in op.after:
                    with pytest.raises(ScheduleError):
                        check(changed(schedule, op.id, after=tuple(a for a in op.after if a != edge)))


def changed(schedule: Schedule, position: int, **changes: object) -> Schedule:
    ops = list(schedule.ops)
    ops[position] = dataclasses.replace(ops[position], **changes)  # type: ignore[arg-type]
    return schedule.model_copy(update={"ops": tuple(ops)})


def deaf(schedule: Schedule, phase: int, only: int = -1, to: int = -1) -> Schedule:
    """`schedule` whose waits of a phase (of the op `only`, of the worker `to`) overlook what they wait for."""
    for op in schedule.ops:
        if op.kind == "wait" and op.id == (op.id if only < 0 else only):
            kept = tuple(f for f in op.reads if f.index[0] != phase or f.index[1] != (f.index[1] if to < 0 else to))
            schedule = changed(schedule, op.id, reads=kept)
    return schedule


@pytest.mark.parametrize("phase", ["published", "stored"])
@pytest.mark.parametrize("seed", range(12))
def test_every_wait_for_another_worker_is_needed(seed: int, phase: str) -> None:
    plans, shape = team_case(seed)
    number, draw = PHASES.index(phase), random.Random(seed)
    steps = schedules(plans, shape)[:3]
    for position, side_by_side in enumerate(steps):
        for worker, schedule in enumerate(side_by_side):
            waits = [op for op in schedule.ops if op.kind == "wait" and op.reads[0].index[0] == number]
            if waits:
                op = draw.choice(waits)
                spoiled = [list(each) for each in steps]
                spoiled[position][worker] = deaf(schedule, number, op.id, draw.choice(op.reads).index[1])
                with pytest.raises(ScheduleError, match=r"without waiting for|overwritten by"):
                    check_workers(spoiled)


@pytest.mark.parametrize("worker", range(3))
@pytest.mark.parametrize("phase", ["taken", "summed"])
def test_rings_and_sums_are_waited_for(phase: str, worker: int) -> None:
    """A later wait of these kinds often implies an earlier one; together they are needed."""
    units = tuple(unit(kind, (4, 4, 4)).model_copy(update={"owners": (0, 1, 2)}) for kind in (0, *[1] * 6, 2))
    placement = ("card", *["streamed"] * 6, "card")
    plans = [plan(units=units, placement=placement, workers=3, worker=w, ring=2, waves=2) for w in range(3)]
    steps = [[build(one, step(4, 4, pending=pending)) for one in plans] for pending in (False, True)]
    check_workers(steps)
    steps[0][worker] = deaf(steps[0][worker], PHASES.index(phase))
    with pytest.raises(ScheduleError, match="without waiting for"):
        check_workers(steps)


def test_workers_that_wait_in_a_circle_are_named() -> None:
    plans, _ = team_case(3)
    side_by_side = [build(plan, step(4)) for plan in plans]
    signals = [op for op in side_by_side[1].ops if op.kind == "signal"]
    side_by_side[1] = changed(side_by_side[1], signals[0].id, kind="norm")
    with pytest.raises(ScheduleError, match="workers wait for each other: worker 0's op"):
        check_workers([side_by_side])
