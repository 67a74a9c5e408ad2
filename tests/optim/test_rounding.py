"""Keyed stochastic rounding: unbiased, and a function of key and place alone."""

from __future__ import annotations

import torch

from muletrain.optim.rounding import halves, keyed_bits, stochastic_bfloat16

KEY = 0x1234_5678_9ABC_DEF0 >> 1


def key(value: int) -> torch.Tensor:
    return torch.tensor(value)


def uniform(words: torch.Tensor) -> torch.Tensor:
    """In [0, 1), from all 32 bits."""
    return (words.double() + 2**31) / 2**32


def test_known_words_never_change() -> None:
    """By the definition, in plain integers: a run resumed by a later release must round as before."""

    def mixed(word: int) -> int:
        word = (word ^ word >> 16) * 0x7FEB352D & 0xFFFFFFFF
        word = (word ^ word >> 15) * 0x846CA68B & 0xFFFFFFFF
        return word ^ word >> 16

    indices = [0, 1, 255, 10**6, 2**31 - 1, 2**31, 2**40 + 12345]
    expected = [mixed(mixed(i & 0x7FFFFFFF ^ KEY & 0x7FFFFFFF) ^ i >> 31 ^ KEY >> 31 & 0x7FFFFFFF) for i in indices]
    words = keyed_bits(key(KEY), torch.tensor(indices))
    assert [word & 0xFFFFFFFF for word in words.tolist()] == expected


def test_any_slice_has_the_same_bits() -> None:
    whole = keyed_bits(key(KEY), torch.arange(10_007))
    for start, stop in ((0, 1), (1, 18), (777, 5000), (10_000, 10_007)):
        assert torch.equal(keyed_bits(key(KEY), torch.arange(start, stop)), whole[start:stop])
        assert torch.equal(keyed_bits(key(KEY), torch.arange(stop - start) + torch.tensor(start)), whole[start:stop])


def test_words_are_uniform_and_unrelated() -> None:
    n = 200_000
    low, high = halves(keyed_bits(key(KEY), torch.arange(n)))
    for half in (low, high):
        counts = torch.bincount(half >> 8, minlength=256).double()
        assert 150 < ((counts - n / 256) ** 2 / (n / 256)).sum() < 380, "chi-square of 255 degrees of freedom"
    other = halves(keyed_bits(key(KEY + 1), torch.arange(n)))[0]
    for a, b in ((low, high), (low[1:], low[:-1]), (low[256:], low[:-256]), (low, other)):
        assert abs(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1]) < 5 / n**0.5


def test_an_element_under_many_keys_is_uniform() -> None:
    keys = torch.arange(100_000) * 0x9E3779B97F4A + 7
    draws = uniform(keyed_bits(keys, torch.tensor(42)))
    assert abs(draws.mean() - 0.5) < 0.005 and abs(draws.var() - 1 / 12) < 0.002


def test_rounding_is_unbiased() -> None:
    values = torch.tensor([1.0 + 2**-9, -1.0 - 2**-9, 1.0 + 2**-12, 3e-20, -7.123e5, 1.0, 1e-40])
    keys = torch.arange(40_000) * 0x9E3779B97F4A + 3
    noise = halves(keyed_bits(keys[:, None], torch.arange(len(values))))[0]
    rounded = stochastic_bfloat16(values.expand(len(keys), -1), noise).double()
    exact = values.double()
    step = (rounded.amax(0) - rounded.amin(0)).clamp(min=1e-60)
    assert (((rounded.mean(0) - exact) / step).abs() < 0.5 * 5 / len(keys) ** 0.5).all()
    assert (rounded[:, 5] == 1.0).all(), "what bf16 holds is never moved"
    assert len(rounded[:, 0].unique()) == 2


def test_only_the_two_neighbours() -> None:
    values = torch.randn(50_000, generator=torch.Generator().manual_seed(0))
    rounded = stochastic_bfloat16(values, halves(keyed_bits(key(KEY), torch.arange(50_000)))[0]).float()
    down = (values.view(torch.int32) & -0x10000).view(torch.float32)
    up = ((values.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    assert ((rounded == down) | (rounded == up)).all()


def test_nan_and_infinity_are_kept() -> None:
    nan_with_low_payload = torch.tensor([0x7F800001, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    values = torch.cat([torch.tensor([float("inf"), float("-inf"), float("nan")]), nan_with_low_payload])
    for noise in (0, 1, 0x8000, 0xFFFF):
        rounded = stochastic_bfloat16(values, torch.full((5,), noise, dtype=torch.int32))
        assert rounded[0] == float("inf") and rounded[1] == float("-inf") and rounded[2:].isnan().all()
