"""Rates of a device: measured ones win, the catalogue's are shares of the peak, nothing is guessed."""

from __future__ import annotations

import pytest

from muletrain.planner.speed import speed_of, with_rates
from muletrain.spec.errors import InputError
from muletrain.spec.machine import LinksTogether
from tests.planner.boxes import H200, RTX_4090, T4, box, measured_box, one


def test_measured_rates_win_and_each_card_has_its_own_link() -> None:
    machine = measured_box(H200, H200, device=H200.name)
    speed = speed_of(machine, "bf16", 1)
    assert speed.source == "measured on box, 2026-11-30T00:00:00Z"
    assert (speed.memory_bytes_s, speed.kernel_s) == (100.0, 0.5)
    assert speed.link is not None and (speed.link.up, speed.link.down, speed.link.both) == (5, 6, 10)
    assert speed_of(machine, "bf16", 0).link is None


def test_a_product_takes_what_its_neighbours_take() -> None:
    speed = speed_of(measured_box(H200, device=H200.name), "bf16")
    assert speed.product_s(1024, 1024, 1024) == 2 * 1024**3 / 8.0
    assert speed.product_s(16, 1024, 1024) == 2 * 16 * 1024**2 / 4.0
    halfway = 2 * 128 * 1024**2 / speed.product_s(128, 1024, 1024)  # three doublings from each: the mean of seconds a FLOP
    assert halfway == pytest.approx(2 / (1 / 8.0 + 1 / 4.0))
    near = 2 * 512 * 1024**2 / speed.product_s(512, 1024, 1024)
    assert near == pytest.approx((1 + 5**-4) / (1 / 8.0 + 5**-4 / 4.0))


def test_power_slows_what_computes_without_pauses() -> None:
    """Measured at half, three quarters and all of the time: 1.1, 0.9 and 0.8 of the best product, of which 1.1 is noise."""
    speed = speed_of(measured_box(H200, device=H200.name), "bf16")
    assert speed.sustained == ((0.5, 1.0), (0.75, pytest.approx(0.9)), (1.0, pytest.approx(0.8)))
    best = speed.product_s(1024, 1024, 1024)
    for share, factor in ((0.0, 1), (0.5, 1), (0.625, 0.95), (0.75, 0.9), (0.875, 0.85), (1.0, 0.8), (1.5, 0.8)):
        slowed = speed.busy(share)
        assert slowed.product_s(1024, 1024, 1024) == pytest.approx(best / factor)
        assert slowed.attention_s(6, 64, 512, backward=True) == pytest.approx(15 / 2.0 / factor)
        assert slowed.memory_bytes_s == speed.memory_bytes_s
    unknown = speed_of(box(RTX_4090), "bf16")
    assert unknown.busy(1.0) == unknown


def test_attention_goes_by_its_own_rates() -> None:
    speed = speed_of(measured_box(H200, device=H200.name), "bf16")
    assert speed.attention_s(6e6, 64, 512) == 6e6 / 3.0
    assert speed.attention_s(6e6, 64, 512, backward=True) == 2.5 * 6e6 / 2.0


def test_the_catalogue_gives_shares_of_the_peak() -> None:
    speed = speed_of(box(RTX_4090), "bf16")
    assert 1 / speed.product_s(1, 1, 1) == pytest.approx(0.95 * 165.2e12 / 2)
    assert speed.memory_bytes_s == pytest.approx(0.87 * 1008e9)
    assert speed.link is not None and speed.link.up == pytest.approx(0.79 * 16 * 1.969e9)
    assert speed.source == "catalogue: RTX 4090, shares of its dense peak"


def test_a_product_rate_in_the_catalogue_comes_before_the_share() -> None:
    assert 2 / speed_of(box(H200), "bf16").product_s(1, 1, 1) == pytest.approx(794.5e12)
    assert 2 / speed_of(box(H200), "fp32").product_s(1, 1, 1) == pytest.approx(0.80 * 66.9e12)  # training does not use tf32


def test_rates_can_be_told() -> None:
    speed = with_rates(speed_of(box(RTX_4090), "bf16"), product_flops_s=150e12, link_bytes_s=24.5e9)
    assert 2 / speed.product_s(7, 8, 9) * 504 == pytest.approx(150e12)
    assert speed.link is not None and (speed.link.down, speed.link.both) == (24.5e9, 44.1e9)
    forward = speed.attention_s(1e9, 64, 64)
    assert forward == pytest.approx(speed_of(box(RTX_4090), "bf16").attention_s(1e9, 64, 64) * 0.95 * 165.2 / 150)


def test_what_is_neither_measured_nor_known_is_told() -> None:
    unknown = RTX_4090.model_copy(update={"name": "GeForce 9999"})
    with pytest.raises(InputError, match="GeForce 9999 is not in the catalogue: measure it with `mule probe"):
        speed_of(box(unknown), "bf16")
    with pytest.raises(InputError, match="Tesla T4 has no bf16 rate in the catalogue"):
        speed_of(box(T4), "bf16")
    with pytest.raises(InputError, match="the processor of box is not measured, and no catalogue has it: run `mule probe"):
        speed_of(box(), "fp32")
    with pytest.raises(InputError, match="NVIDIA H200 of box was measured in bf16, fp32, not in fp16"):
        speed_of(measured_box(H200, device=H200.name), "fp16")


def test_cards_share_the_way_through_host_memory() -> None:
    machine = measured_box(H200, H200, device=H200.name)
    assert machine.measured is not None
    both = LinksTogether(up=one(8.0), down=one(40.0), both=one(12.0))
    machine = machine.model_copy(update={"measured": machine.measured.model_copy(update={"together": both})})
    alone = speed_of(machine, "bf16", 1)
    found = alone.among(2, machine)
    assert found.link is not None and found.link.rates == (4.0, 6.0, 6.0)
    assert found.products == alone.products
    turns = alone.among(4, machine)  # two a card
    assert turns.link is not None and turns.link.rates == (1.0, 3.0, 1.5)
    assert turns.product_s(64, 64, 64) == pytest.approx(2 * alone.product_s(64, 64, 64))
    assert turns.memory_bytes_s == alone.memory_bytes_s / 2


def test_attention_of_another_format_goes_by_its_products() -> None:
    """Attention was measured in bf16 at 3 and 2, the best product at 8 in bf16 and 1 in fp32."""
    speed = speed_of(measured_box(H200, device=H200.name), "fp32")
    assert speed.attention_s(6.0, 64, 512) == pytest.approx(6 / (3 / 8))
    assert speed.attention_s(6.0, 64, 512, backward=True) == pytest.approx(15 / (2 / 8))
