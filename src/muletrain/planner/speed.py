"""Speed: what one device does at the work that training is made of, measured by `mule probe` or from the catalogue.

Measured: a product of any shape takes what its neighbours among the measured ones take, by their distance in powers of two in
all three sizes; attention likewise by head size and length. From the catalogue: the dense peak times what is reached of it.
Shares of the peak, where a card's own product rate is not in the catalogue: products 0.80 (median of the eight cards of the
catalogue that have one: 0.64 to 0.87), 0.95 of GeForce's 16-bit peak, which fp32 accumulation halves (RTX 4090: 151 to 168 of
165 TFLOP/s measured); attention 0.60 forward and 0.50 backward (FlashAttention-2, Dao 2023, A100), 0.31 and 0.26 from Hopper
on, whose own instructions that kernel does not use (`mule probe` on an H200, heads of 128); memory 0.87 of the stated
bandwidth; both ways of a link together 0.90 of the sum (measured on an H200 at 0.88 to 0.91, docs/LOG.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from muletrain.catalog.gpus import driver_spec
from muletrain.spec.errors import InputError
from muletrain.spec.machine import ComputeRates, Gpu, LinkRates, Machine
from muletrain.spec.recipe import ComputeDtype

PRODUCT_SHARE, GEFORCE_PRODUCT_SHARE = 0.80, 0.95
ATTENTION_SHARE: Final = (0.60, 0.50)
HOPPER_ATTENTION_SHARE: Final = (0.31, 0.26)
MEMORY_SHARE: Final = 0.87
DUPLEX_SHARE: Final = 0.90
KERNEL_S, COPY_S = 5e-6, 10e-6
"""From one operation to the next and for starting a copy, where nothing is measured (an H200 with 16 cores: 4 and 9)."""

Point = tuple[tuple[int, ...], float]
"""(sizes, rate)."""


@dataclass(frozen=True)
class Link:
    """Bytes a second between host and card."""

    up: float
    down: float
    both: float
    copy_s: float

    @property
    def rates(self) -> tuple[float, float, float]:
        """Up, down, both."""
        return self.up, self.down, self.both


@dataclass(frozen=True)
class Speed:
    """One device, in one number format. Rates in FLOP/s and bytes/s, with pauses that let a card cool."""

    source: str
    """Where it is from, for a person."""
    products: tuple[Point, ...]
    """By (m, k, n)."""
    attention_forward: tuple[Point, ...]
    """By (head_dim, sequence), over the causal half's FLOPs."""
    attention_backward: tuple[Point, ...]
    memory_bytes_s: float
    kernel_s: float
    link: Link | None
    """None: the processor, or a card whose link was not measured."""
    sustained: tuple[tuple[float, float], ...] = ()
    """(share of the time that the device computes, share of the rates that its power then leaves), rising. Empty: all."""

    def busy(self, share: float) -> Speed:
        """The speed of a device that computes for `share` of the time: products and attention as its power lets them."""
        factor, before = 1.0, (0.0, 1.0)
        for there in self.sustained:
            if share >= before[0]:
                part = min(1.0, (share - before[0]) / (there[0] - before[0]))
                factor = before[1] + part * (there[1] - before[1])
            before = there
        return self if factor == 1.0 else self._computing(factor)

    def _computing(self, factor: float) -> Speed:
        return replace(
            self,
            products=_scaled(self.products, factor),
            attention_forward=_scaled(self.attention_forward, factor),
            attention_backward=_scaled(self.attention_backward, factor),
        )

    def among(self, workers: int, machine: Machine) -> Speed:
        """Of one of `workers` that run at once: links share their way through host memory where that was measured, and where
        there are fewer cards than workers, these take turns on them."""
        together = machine.measured.together if machine.measured else None
        link = self.link
        if link is not None and together is not None:
            up, down, both = (min(own, of_all.median / workers) for own, of_all in zip(link.rates, together.rates, strict=True))
            link = Link(up, down, both, link.copy_s)
        turns = -(-workers // max(1, len(machine.gpus)))
        if turns == 1:
            return replace(self, link=link)
        if link is not None:
            link = Link(link.up / turns, link.down / turns, link.both / turns, link.copy_s)
        return replace(self._computing(1 / turns), memory_bytes_s=self.memory_bytes_s / turns, link=link)

    def product_s(self, m: int, k: int, n: int) -> float:
        """Seconds of an m x k by k x n product."""
        return 2.0 * m * k * n / _near(self.products, (m, k, n))

    def attention_s(self, flops: float, head_dim: int, sequence: int, *, backward: bool = False) -> float:
        """Seconds of attention whose forward does `flops`; backward does 2.5 times that."""
        rates = self.attention_backward if backward else self.attention_forward
        return flops * (2.5 if backward else 1.0) / _near(rates, (head_dim, sequence))


def speed_of(machine: Machine, dtype: ComputeDtype, gpu: int = 0) -> Speed:
    """Of the card `gpu` of `machine`, or of its processor if it has no cards. Measured rates win. Raises InputError for a card
    that is neither measured nor in the catalogue, or a format that was not measured."""
    if not machine.gpus:
        return _measured(machine, "cpu", dtype, None)
    card = machine.gpus[gpu]
    measured = machine.measured
    if measured is not None and any(rates.device == card.name for rates in measured.compute):
        link = next((link for link in measured.links if link.gpu == gpu), None)
        return _measured(machine, card.name, dtype, link)
    return catalogue_speed(card, dtype)


def catalogue_speed(card: Gpu, dtype: ComputeDtype) -> Speed:
    """From the card's data sheet. Raises InputError for an unknown card or a format that it does not compute in."""
    spec = driver_spec(card.name)
    peak = spec.flops.get(dtype) if spec else None
    if spec is None or peak is None:
        what = "is not in the catalogue" if spec is None else f"has no {dtype} rate in the catalogue"
        raise InputError(f"{card.name} {what}: measure it with `mule probe --out machine.json` and plan with --on machine.json")
    half = dtype in ("bf16", "fp16")
    product = spec.measured_bf16_flops if half else 0.0
    forward, backward = HOPPER_ATTENTION_SHARE if spec.capability >= (9, 0) and not spec.geforce else ATTENTION_SHARE
    link = spec.link_bytes_s
    return Speed(
        source=f"catalogue: {spec.name}, shares of its dense peak",
        products=(((1, 1, 1), product or (GEFORCE_PRODUCT_SHARE if spec.geforce and half else PRODUCT_SHARE) * peak),),
        attention_forward=(((1, 1), forward * peak),),
        attention_backward=(((1, 1), backward * peak),),
        memory_bytes_s=MEMORY_SHARE * spec.bandwidth_bytes_s,
        kernel_s=KERNEL_S,
        link=Link(link, link, 2 * DUPLEX_SHARE * link, COPY_S),
    )


def with_rates(speed: Speed, *, product_flops_s: float = 0.0, link_bytes_s: float = 0.0) -> Speed:
    """`speed` with another product rate for all shapes, attention in proportion, and another link, the same each way."""
    if product_flops_s:
        by = product_flops_s / max(rate for _, rate in speed.products)
        speed = replace(speed._computing(by), products=(((1, 1, 1), product_flops_s),))
        speed = replace(speed, source=f"{speed.source}; products at {product_flops_s / 1e12:g} TFLOP/s")
    if link_bytes_s:
        both = 2 * DUPLEX_SHARE * link_bytes_s
        link = Link(link_bytes_s, link_bytes_s, both, speed.link.copy_s if speed.link else COPY_S)
        source = f"{speed.source}; link {link_bytes_s / 1e9:g} GB/s each way, {both / 1e9:g} both"
        speed = replace(speed, link=link, source=source)
    return speed


def _measured(machine: Machine, device: str, dtype: ComputeDtype, link: LinkRates | None) -> Speed:
    measured = machine.measured
    rates = None if measured is None else next((rates for rates in measured.compute if rates.device == device), None)
    if measured is None or rates is None:
        raise InputError(
            f"the processor of {machine.hostname} is not measured, and no catalogue has it: run `mule probe --out "
            "machine.json` there and plan with --on machine.json"
        )
    return Speed(
        source=f"measured on {machine.hostname}, {measured.taken}",
        products=_products(rates, dtype, machine.hostname),
        attention_forward=_attention(rates, dtype, backward=False),
        attention_backward=_attention(rates, dtype, backward=True),
        memory_bytes_s=rates.memory_bytes_s.median,
        kernel_s=rates.kernel_s.median,
        link=None if link is None else Link(link.up.median, link.down.median, link.both.median, link.copy_s.median),
        sustained=_sustained(rates),
    )


def _scaled(points: tuple[Point, ...], by: float) -> tuple[Point, ...]:
    return tuple((sizes, by * rate) for sizes, rate in points)


def _sustained(rates: ComputeRates) -> tuple[tuple[float, float], ...]:
    """Over the best product as it is measured with pauses; more than that is noise."""
    best = max(rate.flops_s.median for rate in rates.matmuls if rate.dtype in ("bf16", "fp16")) if rates.sustained else 1.0
    return tuple((found.busy, min(1.0, found.flops_s.median / best)) for found in rates.sustained)


def _products(rates: ComputeRates, dtype: ComputeDtype, hostname: str) -> tuple[Point, ...]:
    found = tuple(((rate.m, rate.k, rate.n), rate.flops_s.median) for rate in rates.matmuls if rate.dtype == dtype)
    if not found:
        there = ", ".join(sorted({rate.dtype for rate in rates.matmuls}))
        raise InputError(
            f"{rates.device} of {hostname} was measured in {there}, not in {dtype}: set precision.compute to one of these"
        )
    return found


def _attention(rates: ComputeRates, dtype: ComputeDtype, *, backward: bool) -> tuple[Point, ...]:
    """Of the format; where it was measured in another one alone, slower or faster as the best products in the two are."""

    def best(kind: str) -> float:
        return max((rate.flops_s.median for rate in rates.matmuls if rate.dtype == kind), default=0.0)

    found = [rate for rate in rates.attention if rate.dtype == dtype] or rates.attention
    points = []
    for rate in found:
        measured = (rate.backward_flops_s if backward else rate.forward_flops_s).median
        by = 1.0 if rate.dtype == dtype else best(dtype) / best(rate.dtype)
        points.append(((rate.head_dim, rate.sequence), by * measured))
    return tuple(points)


def _near(points: Sequence[Point], sizes: tuple[int, ...]) -> float:
    """The rate at `sizes`: the measured ones' mean of seconds a FLOP, weighted by inverse distance to the fourth power in
    doublings, so that near points count and far ones do not."""
    weights = []
    for there, rate in points:
        apart = sum(math.log2(a / b) ** 2 for a, b in zip(there, sizes, strict=True))
        if apart == 0.0:
            return rate
        weights.append(apart**-2)
    return sum(weights) / sum(weight / rate for weight, (_, rate) in zip(weights, points, strict=True))
