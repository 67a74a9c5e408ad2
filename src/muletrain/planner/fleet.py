"""The cards that a plan is for: "3x RTX 4090", mixed cards, slow slots, a card that also drives a display, or a machine.json.

Cards that do the same step wait for each other, so several of them are worth the weakest of them several times: the smallest
memory, the slowest units, memory and slot. `weakest` says which those are, and the plan repeats it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from muletrain.catalog.gpus import GpuSpec, driver_spec, find_gpu
from muletrain.spec.errors import InputError
from muletrain.spec.machine import Gpu, Machine
from muletrain.spec.units import format_bytes, parse_bytes

_ENTRY = re.compile(r"\s*(?:(\d+)\s*[x×]\s*)?(.+?)\s*(?:@\s*x(\d+))?\s*(?::\s*([\d.]+\s*[A-Za-z]+))?\s*")
_RATE = re.compile(r"\s*([\d.]+)\s*([GM])(b|B)(?:it|its|yte|ytes)?(?:/s|ps)\s*")


@dataclass(frozen=True)
class Fleet:
    """Boxes that are all alike."""

    cards: tuple[GpuSpec, ...]
    """Of one box. Memory is what may be used, lanes are those of the slot."""
    ram_bytes: int
    """Host memory of one box; 0: not stated."""
    boxes: int
    network_bytes_s: float
    """Of one box, one way; 0: one box."""
    machine: Machine
    """One box, for what plans by machine."""

    @property
    def count(self) -> int:
        """Cards in all boxes."""
        return len(self.cards) * self.boxes

    def strongest(self, count: int) -> tuple[GpuSpec, ...]:
        """`count` cards of a box, the fastest and largest first."""
        return tuple(sorted(self.cards, key=_strength, reverse=True)[:count])

    def title(self) -> str:
        """For a person: "3 x RTX 4090"."""
        names = list(dict.fromkeys(_title(card) for card in self.cards))
        text = " + ".join(f"{sum(_title(card) == name for card in self.cards)} x {name}" for name in names)
        return text if self.boxes == 1 else f"{self.boxes} boxes of {text}"


def parse_fleet(text: str, ram: str | None, boxes: int = 1, network: str | None = None) -> Fleet:
    """Cards as people write them: entries joined by + or a comma, each `[COUNTx] NAME[@xLANES][:USABLE]`.

    `ram`: host memory of one box. Raises InputError, naming the entry and the nearest GPU names.
    """
    cards: list[GpuSpec] = []
    for entry in re.split(r"[+,]", text):
        match = _ENTRY.fullmatch(entry)
        if not entry.strip() or match is None:
            raise InputError(
                f"--on: {text!r} is no list of cards; write it like 3x RTX 4090, or 2x RTX 4090 + RTX 3090@x4:22GiB"
            )
        cards += [_slot(find_gpu(match[2]), match[3], match[4])] * int(match[1] or 1)
    if not cards:
        raise InputError(f"--on: {text!r} names no card")
    memory = _size("--ram", ram) if ram else 0
    if boxes > 1 and not network:
        raise InputError("--boxes: say what joins them, e.g. --network 100Gb/s (of one box, one way)")
    gpus = tuple(
        Gpu(name=card.driver_name, memory_bytes=card.memory_bytes, capability=card.capability, driver="") for card in cards
    )
    machine = Machine(hostname=text, cpu="", cores=1, host_memory_bytes=memory, gpus=gpus)
    return Fleet(tuple(cards), memory, boxes, parse_rate(network) if network and boxes > 1 else 0.0, machine)


def machine_fleet(machine: Machine, ram: str | None = None) -> Fleet:
    """A box that was looked at or measured. A card that is in no catalogue is known by its measured rates alone.

    Raises InputError for one that is neither, or without cards.
    """
    if not machine.gpus:
        raise InputError(f"{machine.hostname} has no GPU to plan for; give --on with cards, e.g. --on '3x RTX 4090'")
    cards = tuple(_known(machine, gpu) for gpu in machine.gpus)
    return Fleet(cards, _size("--ram", ram) if ram else machine.host_memory_bytes, 1, 0.0, machine)


def parse_rate(text: str) -> float:
    """Bytes a second: "100Gb/s" is bits, "12GB/s" bytes. Raises InputError."""
    match = _RATE.fullmatch(text)
    if match is None:
        raise InputError(f"--network: {text!r} is not a rate; write it like 100Gb/s or 12GB/s")
    return float(match[1]) * (1e9 if match[2] == "G" else 1e6) / (8 if match[3] == "b" else 1)


def weakest(cards: tuple[GpuSpec, ...]) -> tuple[GpuSpec, tuple[str, ...]]:
    """(a card with the worst of each figure, what holds the others back and by how much)."""
    slow = min(cards, key=lambda card: card.flops.get("bf16", 0.0))
    small = min(cards, key=lambda card: card.memory_bytes)
    far = min(cards, key=lambda card: card.link_bytes_s)
    narrow = min(cards, key=lambda card: card.bandwidth_bytes_s)
    notes = []
    best = max(cards, key=lambda card: card.flops.get("bf16", 0.0))
    if best.flops.get("bf16", 0.0) > slow.flops.get("bf16", 0.0):
        pace = slow.flops.get("bf16", 0.0) / best.flops["bf16"]
        notes.append(f"{slow.name} sets the pace: {pace:.0%} of {best.name}")
    if max(card.memory_bytes for card in cards) > 1.01 * small.memory_bytes:
        notes.append(f"the smallest card sets the size: {small.name} with {format_bytes(small.memory_bytes)}")
    if max(card.link_bytes_s for card in cards) > far.link_bytes_s:
        notes.append(f"the slowest slot sets the transfers: PCIe {far.pcie_generation} x{far.pcie_lanes}, {far.name}")
    held = replace(
        slow,
        memory_bytes=small.memory_bytes,
        pcie_generation=far.pcie_generation,
        pcie_lanes=far.pcie_lanes,
        bandwidth_bytes_s=narrow.bandwidth_bytes_s,
    )
    return held, tuple(notes)


def _strength(card: GpuSpec) -> tuple[float, int, float]:
    return card.flops.get("bf16", 0.0), card.memory_bytes, card.link_bytes_s


def _title(card: GpuSpec) -> str:
    catalogue = driver_spec(card.driver_name)
    text = card.name
    if catalogue and card.pcie_lanes != catalogue.pcie_lanes:
        text += f" at x{card.pcie_lanes}"
    if catalogue and card.memory_bytes < 0.97 * catalogue.memory_bytes:
        text += f" with {format_bytes(card.memory_bytes)}"
    return text


def _slot(card: GpuSpec, lanes: str | None, usable: str | None) -> GpuSpec:
    if lanes:
        if int(lanes) not in (1, 2, 4, 8, 16):
            raise InputError(f"--on: {card.name}@x{lanes}: a slot has 1, 2, 4, 8 or 16 lanes")
        card = replace(card, pcie_lanes=min(int(lanes), card.pcie_lanes or 16))
    if usable:
        size = _size("--on", usable)
        if size > card.memory_bytes:
            raise InputError(f"--on: {card.name}:{usable} is more than its {format_bytes(card.memory_bytes)}")
        card = replace(card, memory_bytes=size)
    return card


def _size(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise InputError(f"{option}: {error}") from None


def _known(machine: Machine, gpu: Gpu) -> GpuSpec:
    spec = driver_spec(gpu.name)
    if spec is not None:
        return replace(spec, memory_bytes=gpu.memory_bytes)
    rates = next((rates for rates in machine.measured.compute if rates.device == gpu.name), None) if machine.measured else None
    if rates is None:
        raise InputError(
            f"{gpu.name} is not in the catalogue; measure it with `mule probe --out machine.json`, then --on machine.json"
        )
    flops: dict[str, float] = {}
    for rate in rates.matmuls:
        flops[rate.dtype] = max(flops.get(rate.dtype, 0.0), rate.flops_s.median)
    return GpuSpec(
        name=gpu.name,
        driver_name=gpu.name,
        segment="measured",
        architecture="",
        capability=gpu.capability,
        memory_bytes=gpu.memory_bytes,
        bandwidth_bytes_s=rates.memory_bytes_s.median,
        flops=flops,
        fp16_fp16_flops=0.0,
        pcie_generation=4,
        pcie_lanes=16,
        nvlink_bytes_s=0.0,
        nvlink_pair=False,
        peer_to_peer=False,
        tdp_w=0.0,
        launch_price_usd=0.0,
        rent_usd_h=(0.0, 0.0),
        rent_source="",
        measured_bf16_flops=flops.get("bf16", 0.0),
        source=f"measured on {machine.hostname}",
        confidence="measured",
    )
