"""What a streamed step keeps on the card and in host memory, by part. Sizes are allocated once, for the largest wave."""

from __future__ import annotations

from muletrain.schedule.build import GRADIENT_SUM_BYTES, waves_of
from muletrain.schedule.layout import Layout
from muletrain.schedule.ops import StepShape, StreamPlan
from muletrain.schedule.workers import PARTS, ring_sizes


def wave_positions(plan: StreamPlan, step: StepShape) -> int:
    """Positions in the largest wave."""
    return max((sum(step.micro_batches[m] for m in wave) for wave in waves_of(plan, step)), default=0)


def sent_positions(plan: StreamPlan, step: StepShape) -> int:
    """Of them, those whose activations offloading units send."""
    waves = waves_of(plan, step)
    return max((sum(step.micro_batches[m] for m in wave if m % plan.offload_every == 0) for wave in waves), default=0)


def card_bytes(plan: StreamPlan, step: StepShape, *, logits_bytes: int = 0, context_bytes: int = 0) -> dict[str, int]:
    """Bytes by part. `logits_bytes`: what the loss needs at once. `context_bytes`: the driver's own memory and workspaces."""
    layout = Layout(plan)
    travels = [u for n, u in enumerate(plan.units) if u.trainable and plan.placed(n) != "card"]
    pieces = [piece for unit in travels for piece in unit.pieces]
    stays = sum(u.parameters for u in plan.units if u.trainable) - sum(u.parameters for u in travels)
    wave, micro_batch = wave_positions(plan, step), max(step.micro_batches, default=0)
    hidden_bytes = plan.hidden * plan.working_bytes
    offloaded = [u.kept_bytes_a_token for u, a in zip(plan.units, plan.activations, strict=True) if a == "offload"]
    kept = sum(u.kept_bytes_a_token for u, a in zip(plan.units, plan.activations, strict=True) if a == "keep")
    input_rows = 2 if plan.inputs == "host" else len(plan.units) - 1
    exchange = {"parts": _parts_bytes(plan)} if plan.workers > 1 else {}
    return {
        "slots": layout.slot_elements() * plan.working_bytes,
        "staging": round(plan.staging * max(pieces, default=0) * max(plan.state_up_bytes, plan.state_down_bytes)),
        "gradients": layout.gradient_elements() * GRADIENT_SUM_BYTES,
        "state": round(stays * (plan.state_down_bytes - plan.working_bytes)),
        "inputs": input_rows * wave * hidden_bytes,
        "hidden_gradients": wave * hidden_bytes,
        "kept": kept * wave,
        "offload": plan.offload_buffers * max(offloaded, default=0) * micro_batch,
        "working": max(u.kept_bytes_a_token for u in plan.units) * micro_batch,
        "logits": logits_bytes,
        "context": context_bytes,
    } | exchange


def _parts_bytes(plan: StreamPlan) -> int:
    """All workers' parts of a piece of gradient, the sum that is made of them, and the sums of a unit that stays on the card in
    the host's format."""
    units = enumerate(plan.units)
    owned = [u.pieces[p] for n, u in units if u.trainable for p in plan.owned(n, plan.worker)]
    rows = plan.workers + (plan.waves > 1)
    stay = [u.parameters for n, u in enumerate(plan.units) if u.trainable and plan.placed(n) == "card"]
    collected = max(stay, default=0) * plan.gradient_bytes
    return max(owned, default=0) * (PARTS * rows * plan.gradient_bytes + GRADIENT_SUM_BYTES) + collected


def host_bytes(plan: StreamPlan, step: StepShape) -> dict[str, int]:
    """Bytes in a box's host memory by part. Of several workers this is the one with the most micro-batches."""
    units = [u for n, u in enumerate(plan.units) if plan.placed(n) != "card"]
    trainable = sum(u.parameters for u in units if u.trainable)
    frozen = sum(u.parameters for u in units if not u.trainable)
    wave = wave_positions(plan, step)
    stored = plan.update == "next_fetch" or plan.waves > 1
    summed, exchange = trainable, {}
    if plan.workers > 1:  # the sums of units that stay on the cards are made on the host too
        summed = sum(u.parameters for u in plan.units if u.trainable)
        ring = sum(ring_sizes([u.parameters for u in plan.units], plan.ring))
        exchange = {"rings": plan.workers * ring * plan.gradient_bytes}
    rows = max(0, len(plan.units) - 3) if plan.inputs == "host" else 0
    offloaded = sum(u.kept_bytes_a_token for u, a in zip(plan.units, plan.activations, strict=True) if a == "offload")
    return {
        "parameters": (frozen + trainable) * plan.working_bytes,
        "state": round(trainable * (plan.state_down_bytes - plan.working_bytes)),
        "gradients": summed * plan.gradient_bytes if stored else 0,
        "inputs": plan.workers * rows * wave * plan.hidden * plan.working_bytes,
        "offload": plan.workers * offloaded * sent_positions(plan, step),
    } | exchange
