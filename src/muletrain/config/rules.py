"""Rules between keys: what a recipe may not ask for together, whatever the machine.

Each rule names the keys it reads, so that all rules whose keys are sound are still checked when another key is wrong, and
everything is reported at once. Rules that need the machine or the model are the planner's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from muletrain.spec.recipe import AdapterSection, PrecisionSection, RunConfig, ScheduleSection

ROUNDING = 0.05
"""How far tokens_per_step may be moved to make whole micro-batches, as a share of it."""


@dataclass(frozen=True)
class Rule:
    """`check` gives a message or None; it is asked only if none of `keys` is in error. The first key is the one to blame."""

    keys: tuple[str, ...]
    check: Callable[[RunConfig], str | None]


def whole_micro_batches(config: RunConfig) -> int | None:
    """Micro-batches in a step over all workers: the nearest whole number, or None where that is off by 5 % or more."""
    unit = config.train.micro_batch * config.data.sequence_length
    wanted = config.train.tokens_per_step
    count = max(1, (wanted + unit // 2) // unit)
    return count if abs(count * unit - wanted) < ROUNDING * wanted or count * unit == wanted else None


def _length(config: RunConfig) -> str | None:
    if config.train.steps is None and config.train.epochs is None:
        return "train.steps, train.epochs: give one of them, e.g. train.steps: 1000 (with both, whichever ends first)"
    return None


def _warmup(config: RunConfig) -> str | None:
    steps, warmup = config.train.steps, config.train.schedule.warmup_steps
    if steps is not None and warmup > steps:
        return f"train.schedule.warmup_steps: {warmup} is more than train.steps ({steps}); the rate would never reach its peak"
    return None


def _decay(config: RunConfig) -> str | None:
    steps, schedule = config.train.steps, config.train.schedule
    if schedule.kind != "wsd" or steps is None or schedule.warmup_steps > steps:
        return None
    decay = math.ceil(schedule.decay_fraction * steps)
    if schedule.warmup_steps + decay > steps:
        return (
            f"train.schedule.decay_fraction: {decay} steps of decay after {schedule.warmup_steps} of warm-up are more than "
            f"train.steps ({steps}); at most {(steps - schedule.warmup_steps) / steps:.4g} fits"
        )
    return None


def _decay_unused(config: RunConfig) -> str | None:
    schedule = config.train.schedule
    if schedule.kind != "wsd" and schedule.decay_fraction != ScheduleSection.model_fields["decay_fraction"].default:
        return f"train.schedule.decay_fraction: only kind: wsd uses it, and kind is {schedule.kind}; remove it"
    return None


def _final_unused(config: RunConfig) -> str | None:
    schedule = config.train.schedule
    if schedule.kind == "constant" and schedule.final_ratio != ScheduleSection.model_fields["final_ratio"].default:
        return "train.schedule.final_ratio: kind: constant never lowers the rate; remove it, or choose linear, cosine or wsd"
    return None


def _scale_unused(config: RunConfig) -> str | None:
    compute, default = config.precision.compute, PrecisionSection.model_fields["initial_loss_scale"].default
    if compute != "fp16" and config.precision.initial_loss_scale != default:
        return f"precision.initial_loss_scale: only compute: fp16 is scaled, and compute is {compute}; remove it"
    return None


def _tokens_per_step(config: RunConfig) -> str | None:
    if whole_micro_batches(config) is not None:
        return None
    micro_batch, length, wanted = config.train.micro_batch, config.data.sequence_length, config.train.tokens_per_step
    unit = micro_batch * length
    below = wanted // unit
    works = " or ".join(f"{count * unit}" for count in (below, below + 1) if count)
    return (
        f"train.tokens_per_step: {wanted} is {wanted / unit:.4g} micro-batches of {micro_batch} x {length} tokens, "
        f"not a whole number; {works} would work"
    )


def _evaluation(config: RunConfig) -> str | None:
    if config.train.evaluate_every and config.data.validation_fraction == 0.0:
        return (
            f"train.evaluate_every: {config.train.evaluate_every}, but data.validation_fraction is 0, so there is nothing to "
            "evaluate on; raise it (0.01) or set evaluate_every: 0"
        )
    return None


def _offload(config: RunConfig) -> str | None:
    strategy = config.memory.strategy
    if config.memory.activations == "offload" and strategy not in ("auto", "streamed"):
        return (
            f"memory.activations: offload, but only memory.strategy: streamed can, and it is {strategy}; use keep or recompute"
        )
    return None


def streamed_only(config: RunConfig) -> dict[str, str]:
    """{key: value} of what `config` asks for and only memory.strategy: streamed can do."""
    asked = {
        "train.optimizer.state": (config.train.optimizer.state, "fp32"),
        "precision.gradients": (config.precision.gradients, "auto"),
        "memory.waves": (config.memory.waves, "auto"),
        "memory.placement": (config.memory.placement, "auto"),
    }
    return {key: str(value) for key, (value, anywhere) in asked.items() if value != anywhere}


def _needs_streamed(config: RunConfig, key: str) -> str | None:
    value, strategy = streamed_only(config).get(key), config.memory.strategy
    if value is None or strategy in ("auto", "streamed"):
        return None
    return f"{key}: {value}, but memory.strategy: {strategy} has no use for it; use streamed, or remove {key}"


def _fp64_state(config: RunConfig) -> str | None:
    if config.precision.compute == "fp64" and config.train.optimizer.state != "fp32":
        return (
            f"train.optimizer.state: {config.train.optimizer.state}, but precision.compute: fp64 keeps moments in fp64; "
            "remove it, or use compute: fp32"
        )
    return None


def _fp64_gradients(config: RunConfig) -> str | None:
    if config.precision.compute == "fp64" and config.precision.gradients != "auto":
        return (
            f"precision.gradients: {config.precision.gradients}, but precision.compute: fp64 keeps gradients in fp64; "
            "remove it, or use compute: fp32"
        )
    return None


def _waves(config: RunConfig) -> str | None:
    waves, most = config.memory.waves, whole_micro_batches(config)
    if waves == "auto" or most is None or waves <= most:
        return None
    return f"memory.waves: {waves}, but a step has {most} micro-batch(es), and no wave may be empty; at most {most}"


def _adapter_unused(config: RunConfig, name: str) -> str | None:
    adapter = config.model.adapter
    value = getattr(adapter, name)
    if adapter.kind != "none" or value == AdapterSection.model_fields[name].default:
        return None
    shown = ", ".join(value) if isinstance(value, tuple) else value
    return f"model.adapter.{name}: {shown}, but model.adapter.kind is none; set model.adapter.kind: lora, or remove it"


def _adapter_targets(config: RunConfig) -> str | None:
    targets = config.model.adapter.targets
    if "auto" in targets and len(targets) > 1:
        return "model.adapter.targets: auto is all linear layers of a block; give auto alone, or names alone"
    return None


def _adapter_gradients(config: RunConfig) -> str | None:
    if config.model.adapter.kind == "none" or config.precision.gradients == "auto":
        return None
    return (
        f"precision.gradients: {config.precision.gradients}, but with model.adapter.kind: lora the only gradients are the "
        "adapter's, which stay in the masters' format; remove it"
    )


RULES = (
    Rule(("train.steps", "train.epochs"), _length),
    Rule(("train.schedule.warmup_steps", "train.steps"), _warmup),
    Rule(("train.schedule.decay_fraction", "train.schedule.kind", "train.schedule.warmup_steps", "train.steps"), _decay),
    Rule(("train.schedule.decay_fraction", "train.schedule.kind"), _decay_unused),
    Rule(("train.schedule.final_ratio", "train.schedule.kind"), _final_unused),
    Rule(("precision.initial_loss_scale", "precision.compute"), _scale_unused),
    Rule(("train.tokens_per_step", "train.micro_batch", "data.sequence_length"), _tokens_per_step),
    Rule(("train.evaluate_every", "data.validation_fraction"), _evaluation),
    Rule(("memory.activations", "memory.strategy"), _offload),
    Rule(("train.optimizer.state", "memory.strategy"), lambda config: _needs_streamed(config, "train.optimizer.state")),
    Rule(("precision.gradients", "memory.strategy"), lambda config: _needs_streamed(config, "precision.gradients")),
    Rule(("memory.waves", "memory.strategy"), lambda config: _needs_streamed(config, "memory.waves")),
    Rule(("memory.placement", "memory.strategy"), lambda config: _needs_streamed(config, "memory.placement")),
    Rule(("model.adapter.rank", "model.adapter.kind"), lambda config: _adapter_unused(config, "rank")),
    Rule(("model.adapter.alpha", "model.adapter.kind"), lambda config: _adapter_unused(config, "alpha")),
    Rule(("model.adapter.dropout", "model.adapter.kind"), lambda config: _adapter_unused(config, "dropout")),
    Rule(("model.adapter.targets", "model.adapter.kind"), lambda config: _adapter_unused(config, "targets")),
    Rule(("model.adapter.rslora", "model.adapter.kind"), lambda config: _adapter_unused(config, "rslora")),
    Rule(("model.adapter.targets",), _adapter_targets),
    Rule(("precision.gradients", "model.adapter.kind"), _adapter_gradients),
    Rule(("train.optimizer.state", "precision.compute"), _fp64_state),
    Rule(("precision.gradients", "precision.compute"), _fp64_gradients),
    Rule(("memory.waves", "train.tokens_per_step", "train.micro_batch", "data.sequence_length"), _waves),
)


def broken_rules(config: RunConfig, unsound: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """(key to blame, message) of each rule that `config` breaks and that reads no key in `unsound`."""
    for rule in RULES:
        if not set(rule.keys) & set(unsound):
            message = rule.check(config)
            if message:
                yield rule.keys[0], message
