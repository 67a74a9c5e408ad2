"""The checker: passes every schedule that is built, and notices each missing dependency and each wrong content."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from muletrain.schedule.build import build
from muletrain.schedule.check import check, describe
from muletrain.schedule.ops import Op, Schedule, ScheduleError
from tests.schedule.plans import plan, random_case, step


def edited(schedule: Schedule, position: int, **changes: Any) -> Schedule:
    """`schedule` with one op changed."""
    ops = list(schedule.ops)
    ops[position] = dataclasses.replace(ops[position], **changes)
    return schedule.model_copy(update={"ops": tuple(ops)})


def fault(schedule: Schedule) -> str | None:
    """What the checker says."""
    try:
        check(schedule)
    except ScheduleError as error:
        return str(error)
    return None


@pytest.mark.parametrize("seed", range(300))
def test_every_built_schedule_passes(seed: int) -> None:
    assert fault(build(*random_case(seed))) is None


@pytest.mark.parametrize("seed", range(40))
def test_every_edge_is_needed(seed: int) -> None:
    """Deleting any single edge fails, and the message names the op that no longer waits and the one it waited for."""
    schedule = build(*random_case(seed))
    for op in schedule.ops:
        for edge in op.after:
            with pytest.raises(ScheduleError) as caught:
                check(edited(schedule, op.id, after=tuple(a for a in op.after if a != edge)))
            named = [int(n) for n in re.findall(r"op (\d+) ", str(caught.value))]
            assert named[0] >= op.id and named[1] <= edge


def small() -> Schedule:
    return build(plan(3, inputs="host"), step(8, 8))


def first(schedule: Schedule, kind: str, unit: int) -> Op:
    return next(op for op in schedule.ops if op.kind == kind and op.unit == unit)


def test_read_of_what_nobody_wrote() -> None:
    schedule = small()
    op = first(schedule, "fetch", 0)
    with pytest.raises(ScheduleError, match=r"op \d+ forward \(unit 0, .*reads slot\[0, 0, 0\], which no op has written"):
        check(edited(schedule, op.id, writes=()))


def test_another_units_parameters() -> None:
    schedule = small()
    op = first(schedule, "fetch", 3)
    with pytest.raises(ScheduleError, match=r"op \d+ forward \(unit 3, .*reads slot.*, overwritten by op \d+ fetch \(unit 2"):
        check(edited(schedule, op.id, unit=2))


def test_another_micro_batchs_input() -> None:
    schedule = small()
    op = first(schedule, "receive", 1)
    with pytest.raises(ScheduleError, match=r"reads host_input\[1, 0\], overwritten by"):
        check(edited(schedule, op.id, micro_batch=1))


def test_overwriting_before_the_reader_is_done() -> None:
    schedule = small()
    op = first(schedule, "fetch", 3)
    with pytest.raises(
        ScheduleError, match=r"fetch \(unit 3, .*overwrites slot.* without waiting for its reader op \d+ forward"
    ):
        check(edited(schedule, op.id, after=()))


def test_two_writers_at_once() -> None:
    schedule = build(plan(1), step(8, mode="evaluate"))
    op = first(schedule, "forward", 0)
    with pytest.raises(
        ScheduleError, match=r"writes slot\[1, 0, 0\] without waiting for op 1 fetch \(unit 1, .*which also does"
    ):
        check(edited(schedule, op.id, writes=(*op.writes, first(schedule, "fetch", 1).writes[0])))


def test_numbers_out_of_order() -> None:
    schedule = small()
    with pytest.raises(ScheduleError, match="waits for a later op"):
        check(edited(schedule, 3, after=(5,)))
    with pytest.raises(ScheduleError, match="stands at 3 of the list"):
        check(edited(schedule, 3, id=4))


def test_an_op_in_words() -> None:
    schedule = build(plan(), step(8, pending=True))
    assert describe(schedule.ops[1]) == "op 1 update (unit 0, wave 0, piece 0)"
    assert describe(schedule.ops[-1]) == f"op {len(schedule.ops) - 1} decide"
