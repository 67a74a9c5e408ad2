"""What a box does, and so how long each op takes alone: measured by the probe or taken from the catalogue, never from the run
that is predicted.

A unit's compute is told in one of two ways. `Rates.units` has the seconds of each unit's parts, as planner.compute derives
them from the model's shape; without it a unit takes its FLOPs over `compute_flops`, which is enough to compare plans on
made-up boxes.
"""

from __future__ import annotations

from muletrain.schedule.ops import Op, Schedule, ScheduleError, StreamPlan
from muletrain.spec.value import Value


class Span(Value):
    """Seconds of work on one micro-batch: `fixed_s`, and `token_s` for each of its positions."""

    fixed_s: float = 0.0
    token_s: float = 0.0

    def of(self, tokens: int) -> float:
        """Seconds for a micro-batch of so many positions."""
        return self.fixed_s + self.token_s * tokens


class UnitTime(Value):
    """Compute of one unit on one micro-batch, by what can be left out."""

    forward: Span
    recompute: Span = Span()
    """What is computed again before backward where activations are neither kept nor offloaded."""
    input_gradient: Span = Span()
    """Backward without gradients of parameters."""
    weight_gradient: Span = Span()
    """What gradients of parameters add to it, summing them over micro-batches included."""


class Rates(Value):
    """A box."""

    compute_flops: float
    """FLOP/s of the model's own forward and backward; used where `units` is empty."""
    up_bytes_s: float
    """Host to card, alone."""
    down_bytes_s: float
    """Card to host, alone."""
    both_bytes_s: float
    """Both directions together when both are busy; each gets its share as the rates alone are to each other."""
    memory_bytes_s: float
    """Device memory, read and written."""
    op_overhead_s: float = 0.0
    """Added to every op."""
    units: tuple[UnitTime, ...] = ()
    """By unit, of the model that is planned."""

    def of_unit(self, plan: StreamPlan, unit: int) -> UnitTime:
        """A unit's times. Raises ScheduleError where `units` is of another model."""
        if self.units:
            if len(self.units) != len(plan.units):
                raise ScheduleError(f"rates name {len(self.units)} units, the plan has {len(plan.units)}")
            return self.units[unit]
        token_s = plan.units[unit].forward_flops_a_token / self.compute_flops
        return UnitTime(
            forward=Span(token_s=token_s),
            recompute=Span(token_s=token_s * plan.recompute_factor),
            input_gradient=Span(token_s=token_s),
            weight_gradient=Span(token_s=token_s),
        )


def forward_s(plan: StreamPlan, unit: int, tokens: int, rates: Rates) -> float:
    """One micro-batch through a unit."""
    return rates.of_unit(plan, unit).forward.of(tokens)


def backward_s(plan: StreamPlan, unit: int, micro_batch: int, tokens: int, rates: Rates) -> float:
    """One micro-batch back through a unit, with what the plan lets it compute again. The head never computes again."""
    time = rates.of_unit(plan, unit)
    total = time.input_gradient.of(tokens)
    if plan.units[unit].trainable:
        total += time.weight_gradient.of(tokens)
    if plan.policy(unit, micro_batch) == "recompute" and unit < len(plan.units) - 1:
        total += time.recompute.of(tokens)
    return total


def alone_s(op: Op, schedule: Schedule, rates: Rates) -> float:
    """An op's time without overhead and without company on the link."""
    if op.resource in ("up", "peers"):
        return op.size_bytes / rates.up_bytes_s
    if op.resource in ("down", "sums"):
        return op.size_bytes / rates.down_bytes_s
    memory_s = op.memory_bytes / rates.memory_bytes_s
    if not rates.units or op.micro_batch < 0:
        return op.flops / rates.compute_flops + memory_s
    plan, tokens = schedule.plan, schedule.step.micro_batches[op.micro_batch]
    if op.kind == "backward":
        return backward_s(plan, op.unit, op.micro_batch, tokens, rates)
    together = op.kind == "epilogue" and schedule.step.mode == "train"
    back = backward_s(plan, op.unit, op.micro_batch, tokens, rates) if together else 0.0
    return forward_s(plan, op.unit, tokens, rates) + back
