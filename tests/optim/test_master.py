"""The split master is an fp32 number, bit by bit."""

from __future__ import annotations

import pytest
import torch

from muletrain.optim.adamw import ParameterState, adamw_update, update_scalars
from muletrain.optim.master import SplitMaster, as_bits, join_master, round_master, split_master
from muletrain.spec.recipe import OptimizerSection


def from_bits(*patterns: int) -> torch.Tensor:
    return torch.tensor([p - (1 << 32) if p >> 31 else p for p in patterns], dtype=torch.int32).view(torch.float32)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def any_patterns(n: int, seed: int) -> torch.Tensor:
    """Every bit pattern is as likely: all exponents, subnormals, both signs; NaNs left out."""
    words = torch.randint(-(1 << 31), 1 << 31, (n,), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    values = words.view(torch.float32)
    return values[~values.isnan()]


def test_every_kind_of_number_joins_back_exactly() -> None:
    values = any_patterns(300_000, 0)
    assert torch.equal(bits(join_master(*split_master(values))), bits(values))


def test_all_low_halves_of_some_high_ones() -> None:
    low = torch.arange(1 << 16)
    for high in (0x0000, 0x8000, 0x007F, 0x3F80, 0xBF7F, 0x7F7F, 0xFF7F):
        words = low + (high << 16)
        values = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).view(torch.float32)
        pair = split_master(values)
        assert torch.equal(bits(join_master(*pair)), bits(values))
        ties = low == 0x8000
        assert torch.equal(pair.hi[~ties].view(torch.int16), values.bfloat16()[~ties].view(torch.int16))


def test_ties_go_away_from_zero() -> None:
    for sign in (0, 0x80000000):
        pair = split_master(from_bits(sign | 0x3F808000, sign | 0x3F818000))
        assert torch.equal(pair.hi.abs(), torch.tensor([1 + 2**-7, 1 + 2 * 2**-7], dtype=torch.bfloat16))
        assert pair.low.tolist() == [-0x8000, -0x8000]


def test_the_copy_is_rounded_not_cut() -> None:
    values = torch.rand(100_000, generator=torch.Generator().manual_seed(1)) + 1.0
    error = (split_master(values).hi.double() - values.double()).mean()
    assert abs(error) < 1e-4, "a cut copy would be too small by 2^-8 on average"


def test_zeros_subnormals_infinities_and_the_largest_number() -> None:
    values = from_bits(0, 0x80000000, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF)
    pair = split_master(values)
    assert torch.equal(bits(join_master(*pair)), bits(values))
    assert torch.equal(pair.hi.view(torch.int16), values.bfloat16().view(torch.int16))
    assert pair.hi[-2:].tolist() == [float("inf"), float("-inf")]


@pytest.mark.parametrize("pattern", [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7F80FFFF, 0x7FFF8000])
def test_nan_stays_nan(pattern: int) -> None:
    pair = split_master(from_bits(pattern))
    joined = join_master(*pair)
    assert pair.hi.isnan() and joined.isnan()
    assert (bits(joined) < 0) == bool(pattern >> 31)
    assert torch.equal(bits(join_master(*split_master(joined))), bits(joined))


def test_into_given_arrays_of_more_than_a_chunk() -> None:
    values = torch.randn((1 << 20) + 77, generator=torch.Generator().manual_seed(2))
    whole = torch.zeros(values.numel() + 5, dtype=torch.bfloat16)
    pair = SplitMaster(whole[5:], torch.zeros(values.numel(), dtype=torch.int16))
    assert split_master(values, out=pair) is pair
    fresh = split_master(values)
    assert torch.equal(pair.hi, fresh.hi) and torch.equal(pair.low, fresh.low) and not whole[:5].any()
    out = torch.empty_like(values)
    assert join_master(*pair, out=out) is out
    assert torch.equal(out, values)


def test_a_working_copy_is_a_split_masters_hi() -> None:
    """Ties included: away from zero, where `.bfloat16()` goes to even."""
    values = any_patterns(10_000, 3)
    ties = (values.view(torch.int32) & -0x10000 | 0x8000).view(torch.float32)
    ties = ties[~ties.isnan()]
    for master in (values, ties):
        copy = torch.empty(master.shape, dtype=torch.bfloat16)
        round_master(master, as_bits(copy))
        assert torch.equal(copy.view(torch.int16), split_master(master).hi.view(torch.int16))
    assert not torch.equal(copy, ties.bfloat16())
    other = torch.empty(ties.shape, dtype=torch.float16)
    round_master(ties, as_bits(other))
    assert torch.equal(other, ties.half())


def test_a_thousand_updates_keep_an_fp32_master() -> None:
    section = OptimizerSection(learning_rate=1e-3, weight_decay=0.1)
    generator = torch.Generator().manual_seed(4)
    start = torch.randn(515, generator=generator)
    plain = ParameterState("w", start.clone(), torch.zeros(515), torch.zeros(515), None, True)
    pair = split_master(start)
    ours = ParameterState("w", start.clone(), torch.zeros(515), torch.zeros(515), None, True)
    for update in range(1000):
        grad = torch.randn(515, generator=generator) * 10.0 ** (update % 7 - 4)
        scalars = update_scalars(section, 1e-3, update, torch.tensor(1.0), torch.tensor(True))
        join_master(*pair, out=ours.master)
        adamw_update([plain, ours], [grad, grad], scalars, section)
        split_master(ours.master, out=pair)
        assert torch.equal(bits(join_master(*pair)), bits(plain.master))
    assert not torch.equal(plain.master, start)
