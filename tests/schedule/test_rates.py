"""How long an op takes alone: by FLOPs, or by the seconds of its unit's parts."""

from __future__ import annotations

import pytest

from muletrain.schedule.build import build
from muletrain.schedule.ops import ScheduleError
from muletrain.schedule.rates import Rates, Span, UnitTime, alone_s, backward_s
from muletrain.schedule.simulate import simulate
from tests.schedule.plans import plan, step, unit

SIMPLE = Rates(compute_flops=10, up_bytes_s=1, down_bytes_s=1, both_bytes_s=1, memory_bytes_s=5)
FIRST = UnitTime(forward=Span(token_s=0.5), weight_gradient=Span(fixed_s=1))
BLOCK = UnitTime(
    forward=Span(token_s=1),
    recompute=Span(token_s=0.75),
    input_gradient=Span(token_s=3),
    weight_gradient=Span(fixed_s=2, token_s=4),
)
LAST = UnitTime(forward=Span(token_s=10), input_gradient=Span(token_s=20), weight_gradient=Span(token_s=30))
BY_UNIT = SIMPLE.model_copy(update={"units": (FIRST, BLOCK, LAST)})


def compute_s(mode: str = "train", **changes: object) -> dict[tuple[str, int], float]:
    """Seconds of each compute op on one micro-batch of 8."""
    schedule = build(plan(1, **changes), step(8, mode=mode))
    ops = [op for op in schedule.ops if op.resource == "compute" and op.kind != "norm"]
    return {(op.kind, op.unit): alone_s(op, schedule, BY_UNIT) for op in ops}


def test_each_op_takes_its_units_seconds() -> None:
    assert compute_s() == {
        ("forward", 0): 4,
        ("forward", 1): 8,
        ("epilogue", 2): 8 * (10 + 20 + 30),
        ("backward", 1): 8 * (3 + 4 + 0.75) + 2,
        ("backward", 0): 1,
    }


def test_what_is_kept_is_not_computed_again() -> None:
    assert compute_s(activations=("recompute", "keep", "recompute"))[("backward", 1)] == 8 * (3 + 4) + 2


def test_evaluation_has_no_gradients() -> None:
    assert compute_s("evaluate") == {("forward", 0): 4, ("forward", 1): 8, ("epilogue", 2): 80}


def test_a_frozen_unit_has_no_gradient_of_its_own() -> None:
    units = (unit(0), unit(1, trainable=False), unit(2))
    assert backward_s(plan(units=units), 1, 0, 8, BY_UNIT) == 8 * (3 + 0.75)


def test_without_seconds_flops_count() -> None:
    """A unit of 20 FLOPs a token at 10 a second: 2 s a token forward, twice that back, 0.9 of it again."""
    chosen = plan(1, recompute_factor=0.9)
    assert backward_s(chosen, 1, 0, 8, SIMPLE) == pytest.approx(8 * (4 + 1.8))
    schedule = build(chosen, step(8))
    back = next(op for op in schedule.ops if op.kind == "backward" and op.unit == 1)
    assert alone_s(back, schedule, SIMPLE) == pytest.approx(backward_s(chosen, 1, 0, 8, SIMPLE))


def test_rates_of_another_model_are_told() -> None:
    with pytest.raises(ScheduleError, match="rates name 3 units, the plan has 4"):
        simulate(build(plan(2), step(8)), BY_UNIT)
