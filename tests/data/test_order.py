"""The keyed order: a permutation, repeatable, unlike for unlike keys, and well mixed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muletrain.data.order import KeyedOrder


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**64), epoch=st.integers(0, 1000))
def test_D12_every_position_once(n: int, seed: int, epoch: int) -> None:
    order = KeyedOrder(n, "rows", seed, epoch)
    assert np.array_equal(np.sort(order(np.arange(n))), np.arange(n))


@pytest.mark.parametrize("n", [*range(1, 70), 4095, 4096, 4097])
def test_D12_every_position_once_at_edges(n: int) -> None:
    assert sorted(KeyedOrder(n, "rows", 0, 0)(np.arange(n)).tolist()) == list(range(n))


def test_D12_epochs_differ_and_seeds_repeat() -> None:
    positions = np.arange(200)
    orders = [KeyedOrder(200, "rows", seed, epoch)(positions).tolist() for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9
    assert orders[4] == KeyedOrder(200, "rows", 1, 1)(positions).tolist()
    assert KeyedOrder(200, "rows", 1, 12)(positions).tolist() != KeyedOrder(200, "rows", 11, 2)(positions).tolist()


@pytest.mark.parametrize("n", [3, 5, 24])
def test_every_value_is_as_likely_at_every_position(n: int) -> None:
    keys = 600
    counts = np.zeros((n, n))
    for key in range(keys):
        counts[np.arange(n), KeyedOrder(n, "rows", key)(np.arange(n))] += 1
    chi_square = ((counts - keys / n) ** 2 / (keys / n)).sum()
    freedom = (n - 1) ** 2
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_neighbours_are_parted() -> None:
    n = 10_000
    order = KeyedOrder(n, "rows", 0, 0)(np.arange(n))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05 and abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.05
    gaps = np.abs(np.diff(order))
    assert abs(gaps.mean() - n / 3) < 0.03 * n, "the mean distance of two independent draws is n / 3"
    assert np.unique(np.diff(order)).size > 0.5 * n, "steps repeat as in a linear sequence"


def test_constant_time_for_any_size() -> None:
    order = KeyedOrder(10**15, "rows", 1)
    values = order(np.array([0, 1, 10**15 - 1]))
    assert len(set(values.tolist())) == 3 and values.max() < 10**15
    with pytest.raises(IndexError):
        order(np.array([10**15]))
