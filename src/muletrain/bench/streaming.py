"""What the streamed strategy would do on cards that are not at hand: simulated, as a table, marked so.

Two answers a point. `built`: the layout that the planner chooses for a run. `best`: what the solver finds when each block may
keep its activations on the card, send them to the host or compute them again (schedule.solve), which takes seconds and the
planner therefore does not ask. Both go through the same schedule and simulator as a run's plan. Of several
cards each has its own link, shares the state's updates with the others, and all share host memory's bandwidth; the card with
the most micro-batches is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from muletrain.catalog.gpus import find_gpu
from muletrain.planner.compute import stream_rates
from muletrain.planner.footprint import CONTEXT_BYTES, HOST_PROCESS_BYTES, Footprint, block_activations
from muletrain.planner.memory import ledger
from muletrain.planner.placement import USABLE, Budget, place
from muletrain.planner.prediction import streamed_timeline
from muletrain.planner.speed import Link, Speed, catalogue_speed, with_rates
from muletrain.planner.streamed import layouts, stream_plan
from muletrain.schedule.ops import StepShape, StreamPlan
from muletrain.schedule.simulate import Timeline
from muletrain.schedule.solve import Box, Choice, choose
from muletrain.spec.errors import DoesNotFitError, InputError
from muletrain.spec.machine import Gpu
from muletrain.spec.model_shape import ModelShape
from muletrain.spec.plan import StreamingPlan
from muletrain.spec.recipe import MemorySection, OptimizerState
from muletrain.spec.value import Value

_GIB = 2**30


@dataclass(frozen=True)
class Cards:
    """The box."""

    speed: Speed
    """Of one card whose link has host memory to itself."""
    card_bytes: int
    host_bytes: int
    host_bytes_s: float
    """What host memory gives and takes over all links together; 0: no limit."""


@dataclass(frozen=True)
class Work:
    """The step."""

    shape: ModelShape
    tokens: int
    """Positions in a step, over all cards."""
    sequence: int
    cards: int
    moments: OptimizerState
    clip: bool


class Simulated(Value):
    """One layout of one point. Rates are over all cards."""

    tokens_per_s: float
    step_s: float
    waiting: float
    """Share of the step that compute waits."""
    micro_batch: int
    """Sequences."""
    card_gib: float
    host_gib: float
    layout: str
    """For a person."""


class Point(Value):
    """One line of the table."""

    tokens: int
    cards: int
    moments: OptimizerState
    clip: bool
    built: Simulated
    best: Simulated


class SimulatedTable(Value):
    """All points asked for. Nothing of it is measured."""

    schema_version: int = 1
    model: str
    gpu: str
    sequence: int
    rates: str
    """Where they are from."""
    simulated: Literal[True] = True
    points: tuple[Point, ...]


def cards_of(gpu: str, host_bytes: int, product_flops_s: float, link_bytes_s: float, host_bytes_s: float) -> Cards:
    """Cards from the catalogue, with the rates that are not 0 in place of its own. Raises InputError for an unknown one."""
    spec = find_gpu(gpu)
    card = Gpu(name=spec.driver_name, memory_bytes=spec.memory_bytes, capability=spec.capability, driver="")
    speed = with_rates(catalogue_speed(card, "bf16"), product_flops_s=product_flops_s, link_bytes_s=link_bytes_s)
    return Cards(speed, spec.memory_bytes, host_bytes, host_bytes_s)


def points(
    shape: ModelShape,
    cards: Cards,
    tokens: Sequence[int],
    counts: Sequence[int],
    moments: Sequence[OptimizerState],
    sequence: int,
    clip: bool,
) -> list[Point]:
    """Each number of tokens on each number of cards in each format. Raises InputError for less than a sequence a step."""
    if min(tokens) < sequence:
        raise InputError(f"--tokens: {min(tokens)} is less than a row of {sequence}; set --sequence lower")
    return [
        point(Work(shape, step, sequence, count, kind, clip), cards) for kind in moments for count in counts for step in tokens
    ]


def point(work: Work, cards: Cards) -> Point:
    """Both answers, each at its best number of sequences in a micro-batch. Raises DoesNotFitError where nothing fits."""
    sizes = micro_batches(work)
    found: list[list[Simulated]] = [[], []]
    problem: DoesNotFitError | None = None
    for size in sizes:
        for answers, answer in zip(found, (built, best), strict=True):
            try:
                answers.append(answer(work, cards, size))
            except DoesNotFitError as error:
                problem = error
    if problem is not None and not all(found):
        raise problem
    found[1] += found[0]  # the planner's layout is one of those that may be chosen
    fastest = [max(answers, key=lambda answer: answer.tokens_per_s) for answers in found]
    return Point(tokens=work.tokens, cards=work.cards, moments=work.moments, clip=work.clip, built=fastest[0], best=fastest[1])


def micro_batches(work: Work) -> list[int]:
    """Sequences in a micro-batch worth trying: of at most 16k tokens, those that leave the busiest card the fewest."""
    rows = work.tokens // work.sequence
    sizes = [size for size in (2**power for power in range(10)) if size <= rows and size * work.sequence <= 16384]
    least = min(_rounds(rows, size, work.cards) * size for size in sizes)
    return [size for size in sizes if _rounds(rows, size, work.cards) * size == least][-3:]


def _rounds(rows: int, size: int, cards: int) -> int:
    """Micro-batches of the busiest card."""
    return math.ceil(math.ceil(rows / size) / cards)


def built(work: Work, cards: Cards, micro_batch: int) -> Simulated:
    """As the planner lays it out. Raises DoesNotFitError with what would fit."""
    speed, limits = _speed(cards, work.cards), Budget(round(USABLE * cards.card_bytes), cards.host_bytes)
    run = _footprint(work, micro_batch)
    placed = place(work.shape, MemorySection(strategy="streamed"), run, limits, speed)
    run = replace(run, streaming=placed.streaming)
    step, needs = streamed_timeline(work.shape, run, speed), placed.ledger
    return _simulated(work, run, step.schedule.plan, step.line, needs.total("card"), needs.total("host"))


def best(work: Work, cards: Cards, micro_batch: int) -> Simulated:
    """The solver's choice of waves, placement and activations."""
    run = _footprint(work, micro_batch)
    run = replace(run, streaming=layouts(work.shape, run.streaming, 0)[-1])
    kept = round(block_activations(work.shape, run) / run.tokens)
    base = stream_plan(work.shape, run)
    last = len(base.units) - 1
    inner = [unit.model_copy(update={"kept_bytes_a_token": kept}) for unit in base.units[1:last]]
    beside = sum(item.size_bytes for item in ledger(work.shape, run).items if item.part in ("logits", "workspace"))
    rates = stream_rates(work.shape, run, _speed(cards, work.cards))
    processes = HOST_PROCESS_BYTES * work.cards
    box = Box(
        card_bytes=round(USABLE * cards.card_bytes), host_bytes=cards.host_bytes - processes, rates=rates,
        logits_bytes=beside, context_bytes=CONTEXT_BYTES,
    )  # fmt: skip
    waves = [waves for waves in (1, 2, 4) if waves <= run.rounds]
    base = base.model_copy(update={"units": (base.units[0], *inner, base.units[last])})
    found: Choice = choose(base, _step(run), box, waves=waves, place=True)
    return _simulated(work, run, found.plan, found.timeline, sum(found.card.values()), sum(found.host.values()) + processes)


def _footprint(work: Work, micro_batch: int) -> Footprint:
    return Footprint(
        strategy="streamed", activations="recompute", compute="bf16", compiled=True, device="cuda", workers=work.cards,
        micro_batch=micro_batch, micro_batches=-(-work.tokens // work.sequence // micro_batch), sequence_length=work.sequence,
        loss_chunk=4096,
        streaming=StreamingPlan(
            moments=work.moments, gradients="bf16", update="next_fetch" if work.clip or work.cards > 1 else "in_backward",
            slices=(1,) * work.cards if work.cards > 1 else (),
        ),
    )  # fmt: skip


def _step(run: Footprint) -> StepShape:
    return StepShape(micro_batches=(run.tokens,) * run.rounds, sequence_length=run.sequence_length, pending=True, mode="train")


def _speed(cards: Cards, count: int) -> Speed:
    """Of one card among `count`: host memory gives each its share."""
    speed, link = cards.speed, cards.speed.link
    if link is None or not cards.host_bytes_s:
        return speed
    share = cards.host_bytes_s / count
    return replace(speed, link=Link(min(link.up, share), min(link.down, share), min(link.both, share), link.copy_s))


def _simulated(work: Work, run: Footprint, plan: StreamPlan, line: Timeline, card: int, host: int) -> Simulated:
    policies = [f"{plan.activations[1:-1].count(what)} {word}" for what, word in _WORDS if what in plan.activations[1:-1]]
    whole = [plan.placed(number) for number in range(len(plan.units))]
    if plan.offload_every > 1 and "offload" in plan.activations:
        policies.append(f"of one micro-batch in {plan.offload_every}")
    count = whole[1:-1].count("card")
    stays = f"{count} block{'s' if count != 1 else ''}" + (" and the ends" if whole[0] == whole[-1] == "card" else "")
    waves = f", {plan.waves} waves" if plan.waves > 1 else ""
    return Simulated(
        tokens_per_s=work.tokens / line.step_s,
        step_s=line.step_s,
        waiting=line.exposed_s / line.step_s,
        micro_batch=run.micro_batch,
        card_gib=card / _GIB,
        host_gib=host / _GIB,
        layout=f"{stays} on the card; {', '.join(policies)}; inputs on the {plan.inputs}{waves}",
    )


_WORDS = (("keep", "keep"), ("offload", "send"), ("recompute", "recompute"))


def markdown(table: SimulatedTable, reference: float) -> str:
    """The table; `reference`: a published rate of one card in tokens a second to compare with, 0: none."""
    compared = " | over the reference, a card" if reference else ""
    lines = [
        f"SIMULATED: {table.model} on {table.gpu}, rows of {table.sequence} tokens, rates: {table.rates}",
        "",
        "| tokens a step | cards | moments | clip | built: tokens/s | waits | card, host GiB | best: tokens/s"
        f"{compared} | waits | card, host GiB | best layout |",
        "|--:|--:|---|---|--:|--:|--:|--:|" + ("--:|" if reference else "") + "--:|--:|---|",
    ]
    for p in table.points:
        share = f" | {p.best.tokens_per_s / p.cards / reference:.2f}" if reference else ""
        lines.append(
            f"| {p.tokens:,} | {p.cards} | {p.moments} | {'yes' if p.clip else 'no'} | {p.built.tokens_per_s:,.0f} | "
            f"{p.built.waiting:.0%} | {p.built.card_gib:.1f}, {p.built.host_gib:.0f} | {p.best.tokens_per_s:,.0f}{share} | "
            f"{p.best.waiting:.0%} | {p.best.card_gib:.1f}, {p.best.host_gib:.0f} | {p.best.layout} |"
        )
    return "\n".join(lines) + "\n"
