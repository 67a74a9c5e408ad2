"""Samples and rates: their arithmetic, and that what takes longer is told so."""

from __future__ import annotations

import time

import torch

from muletrain.probe.timing import Effort, rate, sample, seconds

QUICK = Effort(sample_s=0.002, samples=3, warm_s=0.002)
CPU = torch.device("cpu")


def test_a_sample_is_its_median_and_its_ends() -> None:
    found = sample([3.0, 1.0, 2.0])
    assert (found.median, found.low, found.high, found.n, found.spread) == (2.0, 1.0, 3.0, 3, 1.0)


def test_a_rate_turns_the_ends_round() -> None:
    found = rate(12.0, sample([3.0, 2.0, 4.0]))
    assert (found.median, found.low, found.high, found.n) == (4.0, 3.0, 6.0, 3)


def test_one_call_is_timed_among_several() -> None:
    calls = 0

    def work() -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.001)

    found = seconds(work, CPU, QUICK)
    assert found.low >= 0.001 and found.n == 3
    assert calls >= 3 + found.n
