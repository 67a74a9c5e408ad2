"""The answer to "can I train this here, how fast, for how much": the choice, why, what else there is, and what it hangs on."""

from __future__ import annotations

from dataclasses import replace

from muletrain.planner.assumptions import Assumptions
from muletrain.planner.estimate import Estimate, choose, estimate, quick_s
from muletrain.planner.fleet import Fleet
from muletrain.planner.money import Cost, Prices, run_cost
from muletrain.planner.ways import Work, ways
from muletrain.spec.errors import InputError
from muletrain.spec.units import format_bytes
from muletrain.spec.value import Value

SCHEMA_VERSION = 1
RANGES = {
    "products": ("product", "product_geforce", 0.9, 1.1),
    "attention": ("attention", "", 0.6, 1.5),
    "memory bandwidth": ("memory_share", "", 0.9, 1.1),
    "overlap of communication": ("overlap", "", 0.0, 1.15),
    "host memory bandwidth": ("host_memory_bytes_s", "", 0.6, 1.3),
    "NCCL through host memory": ("through_host_share", "", 0.8, 1.3),
}
"""Assumptions and how far off they may be, as factors."""


class WayRow(Value):
    """One way on these cards. Bytes are of each card and of each box; intervals are (low, high)."""

    name: str
    paper: str
    """Why it is on paper only; empty: `mule train` runs it."""
    fits: bool
    cards: int
    card_bytes: int
    card_spare_bytes: int
    host_bytes: int
    host_spare_bytes: int
    """0 where host memory is not stated."""
    tokens_per_s: float
    tokens_per_s_range: tuple[float, float]
    hours: tuple[float, float]
    kwh: tuple[float, float]
    watts: float
    cost: Cost
    communication: float
    """Share of the step that waits for other cards or the host."""
    utilisation: float
    micro_batch: int
    rounds: int
    notes: tuple[str, ...]
    """What holds other cards back."""
    card_parts: dict[str, int]
    host_parts: dict[str, int]
    time_parts_s: dict[str, float]
    step_s: float
    keys: dict[str, str]
    """Recipe keys that ask for it."""


class PlanAnswer(Value):
    """What `mule plan MODEL --json` prints."""

    schema_version: int = SCHEMA_VERSION
    model: str
    parameters: int
    active_parameters: int
    trained_parameters: int
    method: str
    box: str
    card_memory_bytes: int
    """Of the smallest card."""
    host_memory_bytes: int
    """Of a box; 0: not stated."""
    sequence: int
    tokens: int
    tokens_per_step: int
    choice: WayRow | None
    """The fastest that `mule train` runs here; None: nothing fits."""
    binding: str
    """What keeps it from being faster."""
    runner_up: str
    sensitive_to: str
    """The assumption that moves the answer most."""
    ways: tuple[WayRow, ...]
    """All, best first."""


def answer(work: Work, fleet: Fleet, prices: Prices, assumed: Assumptions) -> PlanAnswer:
    """The whole search. Raises InputError where no card has units for the number format."""
    found: list[Estimate] = []
    refused: list[str] = []
    for group in ways(work, fleet, assumed):
        try:
            found.append(estimate(choose(group, fleet, assumed), fleet, work, assumed))
        except InputError as error:
            refused.append(str(error))
    if not found:
        raise InputError(refused[0])
    found.sort(key=_rank)
    chosen = found[0] if found[0].fits and not found[0].way.paper else None
    others = [each for each in found if each is not chosen]
    return PlanAnswer(
        model=work.shape.name,
        parameters=work.shape.parameters,
        active_parameters=work.shape.active_parameters,
        trained_parameters=work.adapter.parameters or work.shape.parameters,
        method=work.method,
        box=fleet.title(),
        card_memory_bytes=min(card.memory_bytes for card in fleet.cards),
        host_memory_bytes=fleet.ram_bytes,
        sequence=work.sequence,
        tokens=work.tokens,
        tokens_per_step=work.sequences * work.sequence,
        choice=_row(chosen, work, prices, assumed) if chosen else None,
        binding=_binding(chosen, found),
        runner_up=_runner_up(chosen, others),
        sensitive_to=_sensitive(chosen, fleet, assumed) if chosen else "",
        ways=tuple(_row(each, work, prices, assumed) for each in found),
    )


def _rank(each: Estimate) -> tuple[int, float]:
    """Ways that run here and fit, by speed; then those on paper that fit; then the rest, by what they are short of."""
    if each.fits:
        return (0 if not each.way.paper else 1, -each.tokens_per_s)
    return (2, float(-min(each.card_spare, 0) * each.way.all_cards - min(each.host_spare, 0) * each.way.boxes))


def _row(each: Estimate, work: Work, prices: Prices, assumed: Assumptions) -> WayRow:
    way, ledger = each.way, each.ledger
    hours = work.tokens / each.tokens_per_s / 3600
    span = (hours * assumed.step_low, hours * assumed.step_high)
    kwh = (span[0] * each.watts / 1000, span[1] * each.watts / 1000)
    return WayRow(
        name=way.name,
        paper=way.paper,
        fits=each.fits,
        cards=way.all_cards,
        card_bytes=ledger.total("card"),
        card_spare_bytes=each.card_spare,
        host_bytes=ledger.total("host"),
        host_spare_bytes=each.host_spare,
        tokens_per_s=each.tokens_per_s,
        tokens_per_s_range=(each.tokens_per_s / assumed.step_high, each.tokens_per_s / assumed.step_low),
        hours=span,
        kwh=kwh,
        watts=each.watts,
        cost=run_cost(prices, way.all_cards, way.boxes, span, kwh, each.watts),
        communication=each.communication,
        utilisation=each.utilisation,
        micro_batch=way.micro_batch,
        rounds=way.rounds,
        notes=way.notes,
        card_parts={item.part: item.size_bytes for item in ledger.items if item.place == "card"},
        host_parts={item.part: item.size_bytes for item in ledger.items if item.place == "host"},
        time_parts_s=each.parts_s,
        step_s=each.step_s,
        keys=way.keys,
    )


def _binding(chosen: Estimate | None, found: list[Estimate]) -> str:
    """The faster way on as many cards that memory shuts out, or the part of the step that takes longest."""
    if chosen is None:
        closest = next((each for each in found if not each.way.paper), found[0])
        return f"memory: the closest that runs here is {closest.way.name}, {_short(closest)}"
    faster = [
        each
        for each in found
        if not each.fits
        and not each.way.paper
        and each.way.cards == chosen.way.cards
        and each.tokens_per_s > chosen.tokens_per_s
    ]
    part, longest = max(chosen.parts_s.items(), key=lambda item: item[1])
    text = f"{part}, {longest / chosen.step_s:.0%} of a step"
    if faster:
        best = max(faster, key=lambda each: each.tokens_per_s)
        gain = best.tokens_per_s / chosen.tokens_per_s - 1
        text += f"; memory: {best.way.name} would be {gain:.0%} faster and is {_short(best)}"
    return text


def _short(each: Estimate) -> str:
    where = []
    if each.card_spare < 0:
        where.append(f"{format_bytes(-each.card_spare)} short on each card")
    if each.host_spare < 0:
        where.append(f"{format_bytes(-each.host_spare)} short on the host")
    return " and ".join(where) or "short of nothing"


def _runner_up(chosen: Estimate | None, others: list[Estimate]) -> str:
    there = [each for each in others if each.fits and not each.way.paper]
    if chosen is None or not there:
        return "none"
    second = there[0]
    return f"{second.way.name}: {1 - second.tokens_per_s / chosen.tokens_per_s:.0%} slower on {second.way.all_cards} card(s)"


def _sensitive(chosen: Estimate, fleet: Fleet, assumed: Assumptions) -> str:
    base = quick_s(chosen.way, fleet, assumed)
    worst, text = 0.0, "nothing that is assumed"
    for name, (first, second, low, high) in RANGES.items():
        times = []
        for factor in (low, high):
            changes = {each: getattr(assumed, each) * factor for each in (first, second) if each}
            times.append(base / quick_s(chosen.way, fleet, replace(assumed, **changes)))
        if max(times) - min(times) > worst:
            worst = max(times) - min(times)
            span = f"{min(times) - 1:+.0%} to {max(times) - 1:+.0%} of the speed"
            text = f"{name}: {span} if it is {low:g} to {high:g} times what is assumed"
    return text
