"""The loss scale moves by the global verdict only, in powers of two."""

from __future__ import annotations

import pytest
import torch

from muletrain.precision.policy import precision_of
from muletrain.precision.scaler import LossScaler


def test_halves_on_overflow_and_grows_after_a_run_of_good_steps() -> None:
    scaler = LossScaler(True, 65536.0, tokens_per_step=1000)
    scaler.update(finite=False)
    assert scaler.scale == 32768.0
    for _ in range(LossScaler.growth_interval - 1):
        scaler.update(finite=True)
    assert scaler.scale == 32768.0
    scaler.update(finite=True)
    assert scaler.scale == 65536.0


def test_an_overflow_starts_the_count_of_good_steps_again() -> None:
    scaler = LossScaler(True, 4.0, tokens_per_step=1)
    for finite in [True] * (LossScaler.growth_interval - 1) + [False] + [True] * (LossScaler.growth_interval - 1):
        scaler.update(finite)
    assert scaler.scale == 2.0


def test_factor_is_a_power_of_two_in_units_of_the_mean_loss() -> None:
    assert LossScaler(True, 65536.0, tokens_per_step=32768).factor == 2.0
    assert LossScaler(True, 60000.0, tokens_per_step=30000).factor == 2.0


def test_stays_within_bounds() -> None:
    scaler = LossScaler(True, 1.0, 1)
    for _ in range(100):
        scaler.update(finite=False)
    assert scaler.scale == LossScaler.smallest


def test_without_loss_scaling_nothing_moves() -> None:
    scaler = LossScaler(False, 65536.0, 4096)
    scaler.update(finite=False)
    assert scaler.scale == 1.0 and scaler.factor == 1.0
    scaler.load({"scale": 1024.0, "good": 3})
    assert scaler.scale == 1.0


def test_state_round_trip() -> None:
    scaler = LossScaler(True, 65536.0, 4096)
    scaler.update(finite=False)
    scaler.update(finite=True)
    other = LossScaler(True, 65536.0, 4096)
    other.load(scaler.state())
    assert other.state() == scaler.state()


@pytest.mark.parametrize(
    ("name", "compute", "master"),
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.float32),
        ("fp16", torch.float16, torch.float32),
        ("fp64", torch.float64, torch.float64),
    ],
)
def test_masters_are_fp32_unless_everything_is_fp64(name: str, compute: torch.dtype, master: torch.dtype) -> None:
    precision = precision_of(name)
    assert (precision.compute, precision.master, precision.split) == (compute, master, compute != master)
