"""Boxes doubled on paper: speed grows less and less, and from somewhere on another box is not worth it."""

from __future__ import annotations

import pytest

from muletrain.catalog.families import model_shape
from muletrain.catalog.models import model_config
from muletrain.planner.assumptions import Assumptions
from muletrain.planner.fleet import parse_fleet
from muletrain.planner.scale import Scale, scale
from muletrain.planner.ways import Work


def table(network: str, *, on: str = "8x A100 SXM4 80GB", step: int = 2**22, model: str = "deepseek-llm-7b") -> Scale:
    work = Work(model_shape(model_config(model), model), 4096, 10**12, step)
    return scale(work, parse_fleet(on, "2TiB", 2, network), Assumptions())


def test_rows_double_until_rows_of_a_step_run_out() -> None:
    found = table("3200Gb/s")
    assert [row.cards for row in found.rows] == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert found.rows[0].efficiency == 1.0
    assert all(row.fits for row in found.rows)
    assert found.rows[1].gain == pytest.approx(found.rows[1].tokens_per_s / found.rows[0].tokens_per_s - 1)
    assert table("3200Gb/s", step=2**25).rows[-1].cards == 4096


def test_efficiency_falls_and_ethernet_falls_first() -> None:
    fast, slow = table("3200Gb/s"), table("10Gb/s")
    assert fast.rows[-1].efficiency < fast.rows[1].efficiency
    assert slow.rows[3].efficiency < fast.rows[3].efficiency
    assert 0 < slow.worth_up_to < (fast.worth_up_to or 10**9)
    before = next(row for row in slow.rows if row.cards == 2 * slow.worth_up_to)
    assert before.gain < 0.5


def test_state_is_sharded_inside_boxes_where_that_fits_and_is_faster() -> None:
    assert any("sharded inside boxes" in row.way for row in table("25Gb/s").rows)
