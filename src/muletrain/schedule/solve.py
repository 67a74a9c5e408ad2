"""Chooses how a streamed step is laid out: waves, where inputs wait, and what each block does with its activations.

A candidate is (waves, place of inputs, number of blocks that offload): these blocks are spread evenly, the card's remaining
memory keeps what saves most arithmetic per byte, and the rest computes again. Candidates are simulated in the order of a bound
that no timeline beats, until the bound is no better than the best found; then the number of offloading blocks is refined. So
the answer is never worse than any policy that is the same for all blocks: each is among the candidates.

With W choices of waves and B blocks at most 2 W (LADDER + 2) + log2(B) · 2 schedules are built and walked, each in time
proportional to its ops. Rejected: a linear program (what a transfer costs depends on when it runs) and a choice by totals alone
(sends fit only beside forward).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from muletrain.schedule.memory import card_bytes, host_bytes, wave_positions
from muletrain.schedule.ops import StepShape, StreamPlan
from muletrain.schedule.simulate import Rates, Timeline, link_bound_s, simulate_steady
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


def choose(base: StreamPlan, step: StepShape, box: Box, *, waves: Iterable[int] | None = None) -> Choice:
    """The fastest layout of `base` that fits `box`; `waves` limits the numbers of waves tried. The embedding's and the head's
    activations, slots and staging stay as in `base`. Raises DoesNotFitError with the shortfall if nothing fits."""
    tried = sorted(set(waves)) if waves is not None else wave_choices(len(step.micro_batches))
    layouts = [base.model_copy(update={"waves": w, "inputs": i}) for w in tried for i in _INPUTS]
    blocks = len(base.units) - 2
    counts = sorted({round(blocks * rung / LADDER) for rung in range(LADDER + 1)})
    candidates = {plan for layout in layouts for plan in _policies(layout, step, box, counts)}
    fitting = [plan for plan in candidates if _fits(plan, step, box)]
    if not fitting:
        raise DoesNotFitError(_shortfall([_with(layout, {}) for layout in layouts], step, box))
    search = _Search(step, box)
    for bound, plan in sorted(((least_s(p, step, box.rates), p) for p in fitting), key=lambda pair: (pair[0], pair[1].waves)):
        if search.best is not None and bound >= search.best[1].step_s:
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
    """Seconds that no timeline of the plan beats: its arithmetic, or its state and activations over the link."""
    tokens = sum(step.micro_batches)
    pending = plan.update == "next_fetch"
    flops = up = down = 0.0
    for u, (unit, policy) in enumerate(zip(plan.units, plan.activations, strict=True)):
        head, first = u == len(plan.units) - 1, u == 0
        if first and not unit.trainable:
            times = 1.0
        else:
            times = (3 if unit.trainable else 2) + (plan.recompute_factor if policy == "recompute" and not head else 0.0)
        flops += times * unit.forward_flops_a_token * tokens
        if unit.trainable:
            up += unit.parameters * (plan.state_up_bytes - (0 if pending else plan.gradient_bytes))
            down += unit.parameters * (plan.state_down_bytes + (plan.gradient_bytes if pending else 0))
        moved = 0
        if policy == "offload" and not head and (unit.trainable or not first):
            moved += unit.kept_bytes_a_token
        if plan.inputs == "host" and 0 < u < len(plan.units) - 2:
            moved += plan.hidden * plan.working_bytes
        up += moved * tokens
        down += moved * tokens
    # Rounding of pieces to whole bytes is far below a part in a million.
    return (1 - 1e-6) * max(flops / rates.compute_flops, link_bound_s(up / rates.up_bytes_s, down / rates.down_bytes_s, rates))


class _Search:
    """The best plan so far."""

    def __init__(self, step: StepShape, box: Box) -> None:
        self._step, self._box = step, box
        self._seen: set[StreamPlan] = set()
        self.best: tuple[StreamPlan, Timeline] | None = None

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
        if self.best is not None and timeline.step_s >= self.best[1].step_s:
            return False
        self.best = (plan, timeline)
        return True

    def refined(self) -> tuple[StreamPlan, Timeline]:
        """The best after halving steps in the number of offloading blocks."""
        if self.best is None:
            raise ValueError("nothing was tried")
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
        offloading: dict[int, Policy] = {1 + (2 * k + 1) * blocks // (2 * count): "offload" for k in range(count)}
        yield _filled(layout, offloading, step, box)


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
    rest.sort(key=lambda u: (-units[u].forward_flops_a_token / max(1, units[u].kept_bytes_a_token), -u))
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
