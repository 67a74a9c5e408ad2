"""The learning rate is a function of applied updates."""

from __future__ import annotations

import pytest

from muletrain.optim.schedule import learning_rate
from muletrain.spec.recipe import ScheduleSection


def rates(kind: str, steps: int = 10, warmup: int = 3, **fields: float) -> list[float]:
    schedule = ScheduleSection(kind=kind, warmup_steps=warmup, **fields)
    return [learning_rate(schedule, 1.0, steps, update) for update in range(steps)]


def test_warm_up_rises_linearly_to_the_peak() -> None:
    assert rates("constant")[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_by_hand() -> None:
    values = rates("cosine", steps=10, warmup=1, final_ratio=0.1)
    assert values[1] == 1.0
    assert values[5] == pytest.approx(0.1 + 0.9 * 0.5)
    assert values[-1] == pytest.approx(0.1)


def test_linear_by_hand() -> None:
    assert rates("linear", steps=6, warmup=1, final_ratio=0.0) == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_wsd_holds_then_decays_over_the_last_share() -> None:
    values = rates("wsd", steps=10, warmup=1, final_ratio=0.0, decay_fraction=0.4)
    assert values[1:6] == [1.0] * 5
    assert values[6:] == pytest.approx([0.75, 0.5, 0.25, 0.0])


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (2, 1), (5, 5), (5, 9), (1000, 10)])
def test_within_bounds_everywhere_and_steady_past_the_end(kind: str, steps: int, warmup: int) -> None:
    schedule = ScheduleSection(kind=kind, warmup_steps=warmup)
    values = [learning_rate(schedule, 2.0, steps, update) for update in range(steps + 20)]
    assert all(0.0 < value <= 2.0 for value in values)
    assert values[-1] == values[-2]
