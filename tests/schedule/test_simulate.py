"""Timelines: by hand where two or three ops meet, by their laws for random plans."""

from __future__ import annotations

import time

import pytest

from muletrain.schedule.build import build
from muletrain.schedule.ops import Op, Schedule, ScheduleError, StepShape
from muletrain.schedule.rates import Rates
from muletrain.schedule.simulate import Timeline, link_bound_s, simulate, simulate_steady
from tests.schedule.plans import BIG_RATES, plan, random_case, seven_billion, step, unit

UNIT_RATES = Rates(compute_flops=10, up_bytes_s=1, down_bytes_s=1, both_bytes_s=1, memory_bytes_s=5)


def timeline(*ops: Op, rates: Rates = UNIT_RATES) -> Timeline:
    return simulate(Schedule(plan=plan(), step=step(8), ops=ops), rates)


def times(line: Timeline) -> list[tuple[float, float]]:
    return list(zip(line.start, line.end, strict=True))


def test_an_op_waits_for_its_resource_and_for_after() -> None:
    line = timeline(
        Op(0, "fetch", "up", size_bytes=3),
        Op(1, "forward", "compute", flops=20, after=(0,)),
        Op(2, "norm", "compute", memory_bytes=10),
        Op(3, "decide", "host", after=(2,)),
    )
    assert times(line) == [(0, 3), (3, 5), (5, 7), (7, 7)]
    assert line.step_s == 7 and line.exposed_s == 3 and line.tokens == 8
    assert line.busy_s == {"compute": 4, "update": 0, "up": 3, "down": 0, "peers": 0, "sums": 0, "host": 0}
    assert line.bound_s == 4
    assert line.tokens_per_s == 8 / 7


def test_two_directions_share_the_link() -> None:
    """Half speed each while both move: down's 4 bytes take 8 s, in which up moves 4 of its 10."""
    line = timeline(Op(0, "fetch", "up", size_bytes=10), Op(1, "store", "down", size_bytes=4))
    assert times(line) == [(0, 14), (0, 8)]
    assert line.bound_s == 14
    free = timeline(
        Op(0, "fetch", "up", size_bytes=10),
        Op(1, "store", "down", size_bytes=4),
        rates=UNIT_RATES.model_copy(update={"both_bytes_s": 2.0}),
    )
    assert times(free) == [(0, 10), (0, 4)]
    assert free.bound_s == 10


def test_shares_go_by_the_rates_alone() -> None:
    """3 and 1 alone, 2 together: 1.5 and 0.5. After 4 s up's 6 bytes are through; down has 1 of its 3 left at full speed."""
    rates = Rates(compute_flops=1, up_bytes_s=3, down_bytes_s=1, both_bytes_s=2, memory_bytes_s=1)
    line = timeline(Op(0, "fetch", "up", size_bytes=6), Op(1, "store", "down", size_bytes=3), rates=rates)
    assert times(line) == [(0, 4), (0, 5)]
    assert link_bound_s(2, 3, rates) == 5 == line.bound_s


def test_overhead_is_per_op_and_not_in_the_bound() -> None:
    line = timeline(
        Op(0, "forward", "compute", flops=10),
        Op(1, "forward", "compute", flops=10),
        rates=UNIT_RATES.model_copy(update={"op_overhead_s": 0.5}),
    )
    assert times(line) == [(0, 1.5), (1.5, 3)]
    assert line.bound_s == 2


def test_a_circle_is_told() -> None:
    with pytest.raises(ScheduleError, match="op 0 fetch waits for something that waits for it"):
        timeline(Op(0, "fetch", "up", after=(1,)), Op(1, "forward", "compute", after=(0,)))


def test_a_step_by_hand() -> None:
    """One block, evaluation: three fetches of 20 s in a row, each unit's forward of 2 s when its own is there."""
    units = (unit(0, flops=2.5), unit(1, flops=2.5), unit(2, flops=2.5))
    line = simulate(build(plan(units=units), step(8, mode="evaluate")), UNIT_RATES)
    assert line.step_s == 62 and line.exposed_s == 56 and line.busy_s["up"] == 60


@pytest.mark.parametrize("seed", range(60))
def test_laws(seed: int) -> None:
    """Nothing starts before what it waits for, no resource does two things, no step beats its bound."""
    chosen, shape = random_case(seed)
    schedule = build(chosen, shape)
    line = simulate(schedule, UNIT_RATES)
    free_at: dict[str, float] = {}
    for op in schedule.ops:
        assert line.start[op.id] >= max((line.end[a] for a in op.after), default=0.0)
        assert line.start[op.id] >= free_at.get(op.resource, 0.0)
        free_at[op.resource] = line.end[op.id]
    assert line.step_s == max(line.end) >= line.bound_s * (1 - 1e-9)
    assert line.exposed_s == pytest.approx(
        line.step_s - sum(op.flops / 10 + op.memory_bytes / 5 for op in schedule.ops if op.resource == "compute")
    )


def test_faster_links_expose_less() -> None:
    shape = StepShape(micro_batches=(8192, 8192), sequence_length=4096, pending=True, mode="train")
    schedule = build(seven_billion(), shape)
    lines = [
        simulate(
            schedule,
            BIG_RATES.model_copy(update={k: f * getattr(BIG_RATES, k) for k in ("up_bytes_s", "down_bytes_s", "both_bytes_s")}),
        )
        for f in (0.5, 1, 2, 1000)
    ]
    assert [line.exposed_s for line in lines] == sorted((line.exposed_s for line in lines), reverse=True)
    assert lines[-1].exposed_s < 0.01 * lines[-1].step_s


def test_steady_step_applies_the_updates_of_the_one_before() -> None:
    shape = step(8, 8)
    assert simulate_steady(plan(), shape, UNIT_RATES) == simulate(build(plan(), step(8, 8, pending=True)), UNIT_RATES)
    assert simulate_steady(plan(update="in_backward"), shape, UNIT_RATES).busy_s["update"] > 0
    frozen = plan(units=(unit(0, trainable=False), unit(1, trainable=False), unit(2, trainable=False)))
    assert simulate_steady(frozen, shape, UNIT_RATES).busy_s["update"] == 0
    assert simulate_steady(plan(), step(8, mode="evaluate"), UNIT_RATES).busy_s["update"] == 0


def test_twenty_thousand_ops_in_half_a_second() -> None:
    chosen = seven_billion(waves=2, activations=("recompute", *["offload"] * 30, "recompute"))
    schedule = build(chosen, StepShape(micro_batches=(4096,) * 104, sequence_length=4096, pending=True, mode="train"))
    assert len(schedule.ops) > 20_000
    started = time.process_time()
    simulate(schedule, BIG_RATES)
    assert time.process_time() - started < 0.5
