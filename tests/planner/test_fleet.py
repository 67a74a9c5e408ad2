"""Cards as people write them; odd boxes are worth their weakest card."""

from __future__ import annotations

import pytest

from muletrain.planner.fleet import machine_fleet, parse_fleet, parse_rate, weakest
from muletrain.spec.errors import InputError
from muletrain.spec.machine import Gpu

from .boxes import GIB, RTX_4090, box


def test_cards_by_count_and_name() -> None:
    fleet = parse_fleet("3x RTX 4090", "128GiB")
    assert [card.name for card in fleet.cards] == ["RTX 4090"] * 3
    assert (fleet.ram_bytes, fleet.boxes, fleet.count, fleet.title()) == (128 * GIB, 1, 3, "3 x RTX 4090")
    assert fleet.machine.gpus[0].name == "NVIDIA GeForce RTX 4090"
    assert parse_fleet("RTX 4090", None).ram_bytes == 0


@pytest.mark.parametrize("count", [3, 5, 6, 7])
def test_odd_counts(count: int) -> None:
    assert parse_fleet(f"{count} x RTX 4090", "1TiB").count == count


def test_H12_mixed_cards_slow_slots_and_a_display_card() -> None:
    fleet = parse_fleet("2x RTX 4090 + RTX 3090@x4:22GiB", "64GiB")
    assert fleet.title() == "2 x RTX 4090 + 1 x RTX 3090 at x4 with 22.0 GiB"
    held, notes = weakest(fleet.cards)
    assert (held.name, held.memory_bytes, held.pcie_lanes, held.flops["bf16"]) == ("RTX 3090", 22 * GIB, 4, 71e12)
    assert held.bandwidth_bytes_s == 936e9
    assert notes[0] == "RTX 3090 sets the pace: 43% of RTX 4090"
    assert notes[1] == "the smallest card sets the size: RTX 3090 with 22.0 GiB"
    assert notes[2] == "the slowest slot sets the transfers: PCIe 4 x4, RTX 3090"
    assert [card.name for card in fleet.strongest(2)] == ["RTX 4090", "RTX 4090"]
    assert weakest(fleet.strongest(2))[1] == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3x RTX 4900", "'RTX 4900' is not in the GPU catalogue; did you mean"),
        ("", "--on: '' is no list of cards; write it like 3x RTX 4090"),
        ("0x RTX 4090", "--on: '0x RTX 4090' names no card"),
        ("RTX 4090@x3", "--on: RTX 4090@x3: a slot has 1, 2, 4, 8 or 16 lanes"),
        ("RTX 4090:30GiB", "--on: RTX 4090:30GiB is more than its 23.9 GiB"),
    ],
)
def test_what_is_no_list_of_cards(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_fleet(text, None)


def test_sizes_and_networks() -> None:
    with pytest.raises(InputError, match=r"--ram: '128 apples' is not a size"):
        parse_fleet("RTX 4090", "128 apples")
    with pytest.raises(InputError, match="--boxes: say what joins them"):
        parse_fleet("RTX 4090", None, boxes=2)
    with pytest.raises(InputError, match="--network: 'fast' is not a rate; write it like 100Gb/s"):
        parse_fleet("RTX 4090", None, boxes=2, network="fast")
    assert (parse_rate("100Gb/s"), parse_rate("12 GB/s"), parse_rate("800 Mb/s")) == (12.5e9, 12e9, 1e8)
    cluster = parse_fleet("8x RTX 4090", "1TiB", boxes=4, network="100Gb/s")
    assert (cluster.count, cluster.network_bytes_s, cluster.title()) == (32, 12.5e9, "4 boxes of 8 x RTX 4090")


def test_a_box_that_was_looked_at() -> None:
    fleet = machine_fleet(box(RTX_4090, RTX_4090, host_gib=96))
    assert ([card.memory_bytes for card in fleet.cards], fleet.ram_bytes) == ([RTX_4090.memory_bytes] * 2, 96 * GIB)
    assert machine_fleet(box(RTX_4090), "32GiB").ram_bytes == 32 * GIB
    with pytest.raises(InputError, match="box has no GPU to plan for; give --on with cards"):
        machine_fleet(box())
    strange = Gpu(name="Strange 1", memory_bytes=GIB, capability=(9, 0), driver="1")
    with pytest.raises(InputError, match="Strange 1 is not in the catalogue; measure it with `mule probe"):
        machine_fleet(box(strange))
