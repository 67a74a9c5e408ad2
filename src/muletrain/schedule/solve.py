"""Chooses how a streamed step is laid out: waves, where inputs wait, what each block does with its activations, and which
units stay on the card altogether.

A candidate is (waves, place of inputs, number of units that stay, number of blocks that offload): these are spread evenly, the
card's remaining memory keeps what saves most arithmetic per byte, and the rest computes again. Candidates are simulated in the
order of a bound that no timeline beats, until the bound is no better than the best found; then the number of offloading blocks
is refined. So the answer is never worse than any policy that is the same for all blocks: each is among the candidates.

With W choices of waves, P of placement and B blocks at most 2 W P (LADDER + 2) + 2 log2(B) schedules are built and walked,
each in time proportional to its ops; the bound spares most of them. Rejected: a linear program (what a transfer costs depends
on when it runs) and a choice by totals alone (sends fit only beside forward).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from muletrain.schedule.build import waves_of
from muletrain.schedule.memory import card_bytes, host_bytes, wave_positions
from muletrain.schedule.ops import Placement, StepShape, StreamPlan
from muletrain.schedule.rates import Rates, backward_s, forward_s
from muletrain.schedule.simulate import Timeline, link_bound_s, simulate_steady
from muletrain.spec.errors import DoesNotFitError
from muletrain.spec.value import Value

LADDER: Final = 8
"""Steps from no block offloading to all."""
_GIB: Final = 2**30
_Inputs = Literal["card", "host"]
_INPUTS: Final[tuple[_Inputs, ...]] = ("card", "host")


class Box(Value):
    """What a plan must fit, and its speeds."""

    card_bytes: int
    host_bytes: int
    rates: Rates
    logits_bytes: int = 0
    context_bytes: int = 0


@dataclass(frozen=True)
class Choice:
    """The fastest plan found."""

    plan: StreamPlan
    timeline: Timeline
    card: dict[str, int]
    """Bytes by part."""
    host: dict[str, int]
    simulated: int
    """Schedules that were built and walked."""


def choose(base: StreamPlan, step: StepShape, box: Box, *, waves: Iterable[int] | None = None, place: bool = False) -> Choice:
    """The fastest layout of `base` that fits `box`. `waves` limits the numbers of waves tried; `place` lets units stay on the
    card with their state, otherwise placement is as in `base`. The embedding's and the head's activations, slots and staging
    stay as in `base`. Raises DoesNotFitError with the shortfall if nothing fits."""
    tried = sorted(set(waves)) if waves is not None else wave_choices(len(step.micro_batches))
    layouts = [
        base.model_copy(update={"waves": w, "inputs": i, "placement": p})
        for w in tried
        for i in _INPUTS
        for p in (_placements(base) if place else [base.placement])
    ]
    blocks = len(base.units) - 2
    counts = sorted({round(blocks * rung / LADDER) for rung in range(LADDER + 1)})
    candidates = {plan for layout in layouts for plan in _policies(layout, step, box, counts)}
    fitting = [plan for plan in candidates if _fits(plan, step, box)]
    if not fitting:
        raise DoesNotFitError(_shortfall([_with(layout, {}) for layout in layouts], step, box))
    bounds = sorted(((least_s(p, step, box.rates), p) for p in fitting), key=lambda pair: (pair[0], pair[1].waves))
    search = _Search(bounds[0][1], step, box)
    for bound, plan in bounds[1:]:
        if bound >= search.best[1].step_s:
            break
        search.try_plan(plan)
    best = search.refined()
    return Choice(
        plan=best[0],
        timeline=best[1],
        card=card_bytes(best[0], step, logits_bytes=box.logits_bytes, context_bytes=box.context_bytes),
        host=host_bytes(best[0], step),
        simulated=search.simulated,
    )


def wave_choices(micro_batches: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, … and one micro-batch a wave."""
    doubled = (w for power in range(micro_batches.bit_length()) for w in (2**power, 3 * 2**power))
    return sorted({w for w in doubled if w <= micro_batches} | {micro_batches})


def least_s(plan: StreamPlan, step: StepShape, rates: Rates) -> float:
    """Seconds that no timeline of the plan beats, the greatest of three: its arithmetic; its state and activations over the
    link; with updates at the next fetch, all state first and then what must wait for it, which is all but one forward."""
    next_fetch = plan.update == "next_fetch"
    compute = up = down = state_up = state_down = 0.0
    for u, unit in enumerate(plan.units):
        compute += sum(_compute_s(plan, u, m, size, rates) for m, size in enumerate(step.micro_batches))
        moved = sum(_sent_a_token(plan, u, m) * size for m, size in enumerate(step.micro_batches))
        up += moved
        down += moved
        mine = sum(unit.pieces[piece] for piece in plan.owned(u, plan.worker))
        if unit.trainable and plan.workers > 1:  # what is exchanged of its gradient, at least once a step
            up += mine * plan.workers * plan.gradient_bytes
            down += (unit.parameters + mine) * plan.gradient_bytes
        if unit.trainable and plan.placed(u) != "card":
            state_up += mine * (plan.state_up_bytes - (0 if next_fetch else plan.on_card_in_backward_bytes))
            state_down += mine * plan.state_down_bytes
            down += unit.parameters * (plan.gradient_bytes if next_fetch and plan.workers == 1 else 0)
    link = link_bound_s((up + state_up) / rates.up_bytes_s, (down + state_down) / rates.down_bytes_s, rates)
    least = max(compute, link)
    if next_fetch and step.mode == "train":
        # A piece is fetched when the one that had its staging buffer is published.
        unpublished = plan.staging * max(piece for unit in plan.units for piece in unit.pieces) * plan.state_down_bytes
        published = max(0.0, state_down - unpublished)
        first = link_bound_s(state_up / rates.up_bytes_s, published / rates.down_bytes_s, rates)
        forward = max(
            sum(forward_s(plan, u, step.micro_batches[m], rates) for u in range(len(plan.units)) for m in wave)
            for wave in waves_of(plan, step)
        )
        least = max(least, first + compute - forward)
    return (1 - 1e-6) * least  # rounding of pieces to whole bytes is far below a part in a million


def _compute_s(plan: StreamPlan, unit: int, micro_batch: int, tokens: int, rates: Rates) -> float:
    """One micro-batch through a unit and back."""
    back = unit > 0 or plan.units[0].trainable
    return forward_s(plan, unit, tokens, rates) + (backward_s(plan, unit, micro_batch, tokens, rates) if back else 0.0)


def _sent_a_token(plan: StreamPlan, unit: int, micro_batch: int) -> int:
    """Bytes of a unit that go to the host and come back."""
    size = 0
    if plan.policy(unit, micro_batch) == "offload" and unit < len(plan.units) - 1 and (unit > 0 or plan.units[0].trainable):
        size += plan.units[unit].kept_bytes_a_token
    if plan.inputs == "host" and 0 < unit < len(plan.units) - 2:
        size += plan.hidden * plan.working_bytes
    return size


class _Search:
    """The best plan so far, at first `plan`."""

    def __init__(self, plan: StreamPlan, step: StepShape, box: Box) -> None:
        self._step, self._box = step, box
        self._seen = {plan}
        self.best = (plan, simulate_steady(plan, step, box.rates))

    @property
    def simulated(self) -> int:
        """Schedules walked."""
        return len(self._seen)

    def try_plan(self, plan: StreamPlan) -> bool:
        """Whether `plan` is better than all before."""
        if plan in self._seen or not _fits(plan, self._step, self._box):
            return False
        self._seen.add(plan)
        timeline = simulate_steady(plan, self._step, self._box.rates)
        if timeline.step_s >= self.best[1].step_s:
            return False
        self.best = (plan, timeline)
        return True

    def refined(self) -> tuple[StreamPlan, Timeline]:
        """The best after halving steps in the number of offloading blocks."""
        stride = max(1, (len(self.best[0].units) - 2) // LADDER)
        while stride > 1:
            stride //= 2
            plan = self.best[0]
            count = plan.activations.count("offload")
            for neighbour in (count - stride, count + stride):
                if 0 <= neighbour <= len(plan.units) - 2:
                    for candidate in _policies(plan, self._step, self._box, [neighbour]):
                        self.try_plan(candidate)
        return self.best


def _policies(layout: StreamPlan, step: StepShape, box: Box, counts: Iterable[int]) -> Iterator[StreamPlan]:
    """All recompute, and for each count that many blocks offloading, evenly spread, with the card's rest filled."""
    yield _with(layout, {})
    blocks = len(layout.units) - 2
    for count in counts:
        offloading: dict[int, Policy] = dict.fromkeys(spread(blocks, count), "offload")
        yield _filled(layout, offloading, step, box)


def _placements(base: StreamPlan) -> list[tuple[Placement, ...]]:
    """Nothing on the card; the embedding, whose update nothing hides; the head too; then blocks, evenly spread."""
    units, blocks = len(base.units), len(base.units) - 2
    placements: list[tuple[Placement, ...]] = [()]
    counts = sorted({round(blocks * rung / LADDER) for rung in range(LADDER + 1)} | set(range(min(4, blocks + 1))))
    for staying in ({0}, *({0, units - 1, *spread(blocks, count)} for count in counts)):
        placements.append(tuple("card" if u in staying else "streamed" for u in range(units)))
    return placements


def spread(blocks: int, count: int) -> list[int]:
    """`count` of the units 1 … `blocks`, evenly spaced."""
    return [1 + (2 * k + 1) * blocks // (2 * count) for k in range(count)]


Policy = Literal["recompute", "keep", "offload"]


def _with(layout: StreamPlan, policies: dict[int, Policy]) -> StreamPlan:
    """`layout` with these blocks' policies and recomputation in all others."""
    first, last = layout.activations[0], layout.activations[-1]
    blocks = (policies.get(u, "recompute") for u in range(1, len(layout.units) - 1))
    return layout.model_copy(update={"activations": (first, *blocks, last)})


def _filled(layout: StreamPlan, policies: dict[int, Policy], step: StepShape, box: Box) -> StreamPlan:
    """Keeps what saves most arithmetic per byte, while the card has room; of equals the later, which turn around first."""
    plan = _with(layout, policies)
    room = box.card_bytes - _card_total(plan, step, box)
    wave = wave_positions(plan, step)
    units = layout.units
    rest = [u for u in range(1, len(units) - 1) if u not in policies]
    again = [box.rates.of_unit(plan, u).recompute.token_s for u in range(len(units))]
    rest.sort(key=lambda u: (-again[u] / max(1, units[u].kept_bytes_a_token), -u))
    kept = dict(policies)
    for u in rest:
        size = units[u].kept_bytes_a_token * wave
        if size <= room:
            room -= size
            kept[u] = "keep"
    return _with(layout, kept)


def _card_total(plan: StreamPlan, step: StepShape, box: Box) -> int:
    return sum(card_bytes(plan, step, logits_bytes=box.logits_bytes, context_bytes=box.context_bytes).values())


def _fits(plan: StreamPlan, step: StepShape, box: Box) -> bool:
    return _card_total(plan, step, box) <= box.card_bytes and sum(host_bytes(plan, step).values()) <= box.host_bytes


def _shortfall(plans: list[StreamPlan], step: StepShape, box: Box) -> str:
    card = min(_card_total(plan, step, box) for plan in plans)
    host = min(sum(host_bytes(plan, step).values()) for plan in plans)
    parts = []
    if card > box.card_bytes:
        parts.append(f"the card needs {card / _GIB:.1f} GiB of {box.card_bytes / _GIB:.1f}: use smaller micro-batches")
    if host > box.host_bytes:
        parts.append(
            f"the host needs {host / _GIB:.1f} GiB of {box.host_bytes / _GIB:.1f}: use optimizer states of fewer bytes"
        )
    if not parts:  # each fits for itself, but not in one plan: inputs on the card crowd it, inputs on the host crowd that
        parts.append("inputs of blocks fit neither on the card nor in host memory: use fewer tokens a step or more waves")
    return "the streamed strategy does not fit: " + "; ".join(parts)
