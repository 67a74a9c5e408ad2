"""Speed, remaining time and utilisation of a session."""

from __future__ import annotations

import pytest

from muletrain.metrics.meter import Meter, hardware_over_model_flops, model_flops_utilisation
from muletrain.spec.model_shape import ModelShape

SHAPE = ModelShape(
    name="t", family="llama", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=512, tied=False,
    max_positions=256, parameters=150_000, block_parameters=40_000, matmul_parameters=110_000,
)  # fmt: skip


def test_S04_only_trained_tokens_and_step_time_count():
    meter = Meter()
    meter.step(100, 1.0)
    meter.step(300, 1.0)
    meter.other(10.0)
    assert meter.tokens_per_s == 200
    meter.step(0, 2.0)
    assert meter.tokens_per_s == 100, "a skipped step costs time and trains nothing"


def test_R09_remaining_time_goes_by_recent_steps_and_includes_what_is_not_training():
    meter = Meter()
    assert meter.remaining_s(10) is None
    for _ in range(30):
        meter.step(10, 5.0)
    for _ in range(20):
        meter.step(10, 1.0)
    meter.other(25.0)
    assert meter.remaining_s(100) == pytest.approx(100 * (1.0 + 25.0 / 50))
    assert meter.recent_tokens_per_s == 10


def test_one_slow_step_does_not_move_the_remaining_time():
    meter = Meter()
    for seconds in (1.0, 1.0, 60.0, 1.0, 1.0):
        meter.step(10, seconds)
    assert meter.remaining_s(10) == pytest.approx(10.0)


def test_utilisation_is_absent_without_a_peak_and_never_above_one():
    flops = SHAPE.flops_a_token(128)
    assert model_flops_utilisation(SHAPE, 128, 1000.0, 2, flops * 1000) == pytest.approx(0.5)
    assert model_flops_utilisation(SHAPE, 128, 1000.0, 1, 0.0) is None
    assert model_flops_utilisation(SHAPE, 128, 1000.0, 1, flops * 500) is None


def test_recompute_adds_the_blocks_forward_only():
    assert hardware_over_model_flops(SHAPE, 128, recompute=False) == 1.0
    blocks = SHAPE.flops_a_token(128) - 6 * 512 * 64
    assert hardware_over_model_flops(SHAPE, 128, recompute=True) == pytest.approx(1 + blocks / 3 / SHAPE.flops_a_token(128))
