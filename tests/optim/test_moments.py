"""Formats of the moments: error, bias, and what they must never do."""

from __future__ import annotations

import pytest
import torch

from muletrain.optim.moments import BLOCK, Moment, MomentFormat, MomentKind, moment_formats
from muletrain.optim.rounding import halves, keyed_bits

KINDS: list[MomentKind] = ["fp32", "bf16", "8bit"]


def noise(n: int, key: int = 1, start: int = 0) -> torch.Tensor:
    return halves(keyed_bits(torch.tensor(key), torch.arange(start, start + n)))[0]


def through(form: MomentFormat, values: torch.Tensor, key: int = 1) -> torch.Tensor:
    moment = form.allocate(values.numel())
    form.store(moment, values, noise(values.numel(), key))
    return form.load(moment)


def spread(n: int, seed: int = 0) -> torch.Tensor:
    """Numbers over four decades within a block, both signs."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator) * 10 ** (4 * torch.rand(n, generator=generator) - 6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("signed", [True, False])
def test_zeros_stay_zeros_and_bytes_are_as_told(kind: MomentKind, signed: bool) -> None:
    form = MomentFormat(kind, signed)
    moment = form.allocate(4 * BLOCK)
    assert torch.equal(form.load(moment), torch.zeros(4 * BLOCK))
    assert torch.equal(through(form, torch.zeros(4 * BLOCK)), torch.zeros(4 * BLOCK))
    held = sum(t.numel() * t.element_size() for t in moment.tensors())
    assert held == form.bytes_a_parameter * 4 * BLOCK


def test_bytes_a_parameter() -> None:
    assert [MomentFormat(kind, True).bytes_a_parameter for kind in KINDS] == [4, 2, 1 + 1 / 64]


@pytest.mark.parametrize("full", [torch.float32, torch.float64])
def test_full_precision_is_exact(full: torch.dtype) -> None:
    for form in moment_formats("fp32", full):
        values = spread(2 * BLOCK).to(full)
        assert form.dtype == full and torch.equal(through(form, values), values)


@pytest.mark.parametrize("kind", ["bf16", "8bit"])
def test_rounding_formats_need_fp32(kind: MomentKind) -> None:
    with pytest.raises(ValueError, match="belong to fp32 masters"):
        MomentFormat(kind, True, torch.float64)


def test_lengths_are_whole_blocks() -> None:
    with pytest.raises(ValueError, match="multiples of 256"):
        MomentFormat("8bit", True).allocate(300)


def test_error_of_8_bits_is_as_documented() -> None:
    """Neighbouring codes are 4 / code apart, relative; a number goes to one of its two neighbours."""
    values = spread(1000 * BLOCK)
    for form, numbers, levels in zip(moment_formats("8bit"), (values, values.square()), (127, 255), strict=True):
        blocks = numbers.view(-1, BLOCK).double()
        largest = blocks.abs().amax(1, keepdim=True)
        place = (blocks.abs() / largest) ** 0.25 * levels
        gap = largest * (((place.floor() + 1) / levels) ** 4 - (place.floor() / levels) ** 4)
        error = (through(form, numbers).view(-1, BLOCK).double() - blocks).abs()
        assert (error <= gap * 1.01 + largest * 1e-6 * gap / largest).all()
        assert (error / blocks.abs())[place > levels / 2].max() < (0.07 if form.signed else 0.035)


@pytest.mark.parametrize("kind", ["bf16", "8bit"])
@pytest.mark.parametrize("signed", [True, False])
def test_stored_values_are_unbiased(kind: MomentKind, signed: bool) -> None:
    values = spread(BLOCK, seed=3)
    values = values if signed else values.square()
    form = MomentFormat(kind, signed)
    draws = torch.stack([through(form, values, key * 0x9E3779B97F4A) for key in range(1, 2001)]).double()
    gap = torch.maximum(draws.amax(0) - draws.amin(0), values.double().abs() / 256)
    known = values.abs() > values.abs().max() * (0 if signed else 3e-10)
    apart = ((draws.mean(0) - values.double()) / gap)[known]
    assert apart.abs().max() < 5 * 0.5 / len(draws) ** 0.5
    assert abs(apart.mean()) < 5 * 0.5 / (len(draws) * len(apart)) ** 0.5


def test_a_slow_decay_is_not_frozen() -> None:
    """Nearest rounding would keep 0.999 of a number at the number itself, for ever."""
    start = torch.rand(BLOCK, generator=torch.Generator().manual_seed(5)) * 0.5 + 0.5
    for kind in ("bf16", "8bit"):
        form = MomentFormat(kind, False)
        moment, values = form.allocate(BLOCK), start.clone()
        values[0] = 100.0
        for step in range(500):
            form.store(moment, values, noise(BLOCK, key=step * 77_777 + 1))
            values = form.load(moment) * 0.999
            values[0] = 100.0
        assert (values[1:].mean() / start[1:].mean()).item() == pytest.approx(0.999**500, rel=0.03)


def test_a_second_moment_never_vanishes() -> None:
    values = torch.full((BLOCK,), 1e-14)
    values[0], values[1] = 1.0, 0.0
    for key in range(20):
        loaded = through(MomentFormat("8bit", False), values, key)
        assert loaded[0] == 1.0 and loaded[1] == 0.0 and (loaded[2:] > 0).all()


def test_the_largest_of_a_block_is_exact() -> None:
    values = spread(40 * BLOCK)
    loaded = through(MomentFormat("8bit", True), values).view(-1, BLOCK)
    blocks = values.view(-1, BLOCK)
    at = blocks.abs().argmax(1, keepdim=True)
    assert torch.equal(loaded.gather(1, at), blocks.gather(1, at))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", ["bf16", "8bit"])
def test_what_is_not_finite_shows_in_its_block_only(kind: MomentKind, bad: float) -> None:
    values = spread(3 * BLOCK)
    values[BLOCK + 3] = bad
    loaded = through(MomentFormat(kind, True), values)
    assert not loaded[BLOCK + 3].isfinite()
    assert loaded[:BLOCK].isfinite().all() and loaded[2 * BLOCK :].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_views_with_the_same_bits(kind: MomentKind) -> None:
    values, form = spread(8 * BLOCK), MomentFormat(kind, True)
    whole, cut = form.allocate(8 * BLOCK), form.allocate(8 * BLOCK)
    form.store(whole, values, noise(8 * BLOCK))
    for a, b in ((0, 1), (1, 4), (4, 8)):
        part: Moment = cut.part(a * BLOCK, b * BLOCK)
        form.store(part, values[a * BLOCK : b * BLOCK], noise((b - a) * BLOCK, start=a * BLOCK))
    for one, other in zip(whole.tensors(), cut.tensors(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["bf16", "8bit"])
@pytest.mark.parametrize("signed", [True, False])
def test_what_was_decoded_is_encoded_to_the_same_bytes(kind: MomentKind, signed: bool) -> None:
    """At every magnitude down to numbers that are no longer normal, so that a checkpoint may hold fp32."""
    form = MomentFormat(kind, signed)
    exponents = torch.arange(-148, 127).repeat_interleave(BLOCK)
    values = spread(exponents.numel(), seed=5).double() * 2.0 ** exponents.double()
    values = (values if signed else values.abs()).float()
    first, again = form.allocate(values.numel()), form.allocate(values.numel())
    form.store(first, values, noise(values.numel()))
    form.store(again, form.load(first), torch.full((values.numel(),), 0x7FFF, dtype=torch.int32))
    assert first.values.any()
    for one, other in zip(first.tensors(), again.tensors(), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert (form.load(first).view(-1, BLOCK)[-200:] != 0).any(dim=1).all()
