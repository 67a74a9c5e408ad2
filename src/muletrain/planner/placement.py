"""Which device, how many workers, which strategy: rules in a fixed order, no search.

auto takes the strategy with the least communication that fits, and within it keeps activations if that fits: on cards
joined by PCIe a gathered block costs more time than a recomputed one. Strategies in that order: resident, zero1, zero2,
zero3 (these three with several workers), streamed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from muletrain.planner.footprint import Footprint
from muletrain.planner.memory import ledger
from muletrain.planner.offload import offloading
from muletrain.planner.speed import Speed
from muletrain.planner.streamed import layouts, traffic_bytes
from muletrain.spec.errors import DoesNotFitError, InputError
from muletrain.spec.ledger import Ledger
from muletrain.spec.machine import Machine
from muletrain.spec.model_shape import ModelShape
from muletrain.spec.plan import StreamingPlan
from muletrain.spec.recipe import MemorySection, OptimizerState, ParallelSection, StrategyName
from muletrain.spec.units import format_bytes

_ORDER: tuple[StrategyName, ...] = ("resident", "zero1", "zero2", "zero3")
USABLE = 0.97
"""Of a card: the driver keeps 1 to 2 % for itself, and the allocator loses some to rounding."""
_ACTIVATIONS: tuple[Literal["keep", "recompute"], ...] = ("keep", "recompute")


@dataclass(frozen=True)
class Budget:
    """Bytes there are: on the smallest card used (0 on a CPU) and on the box."""

    card: int
    host: int

    def shortfall(self, needed: Ledger) -> int:
        """Bytes missing in the place that misses most; 0 or less: it fits."""
        missing = needed.total("host") - self.host
        return max(missing, needed.total("card") - self.card) if self.card else missing


@dataclass(frozen=True)
class Placement:
    """The choice and its ledger."""

    strategy: StrategyName
    activations: Literal["keep", "recompute"]
    ledger: Ledger
    reasons: tuple[str, ...]
    streaming: StreamingPlan = field(default_factory=StreamingPlan)
    """streamed only."""


def choose_device(section: ParallelSection, machine: Machine) -> tuple[Literal["cpu", "cuda"], str | None]:
    """The device, and why if that was open. Raises InputError where a GPU is asked for and there is none."""
    if section.device == "cuda" and not machine.gpus:
        raise InputError(
            f"parallel.device: cuda, but no NVIDIA GPU is visible on {machine.hostname}; check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES, or set parallel.device: cpu (fine for tiny models)"
        )
    if section.device != "auto":
        return section.device, None
    if machine.gpus:
        return "cuda", f"parallel.device = cuda: {len(machine.gpus)} x {machine.gpus[0].name}"
    return "cpu", "parallel.device = cpu: no NVIDIA GPU is visible"


def choose_workers(section: ParallelSection, device: Literal["cpu", "cuda"], machine: Machine) -> tuple[int, str | None]:
    """The number of workers, and why if that was open. Raises InputError for more workers than GPUs."""
    if section.workers == "auto":
        if device == "cpu":
            return 1, "parallel.workers = 1: one on a CPU"
        return len(machine.gpus), f"parallel.workers = {len(machine.gpus)}: one a GPU"
    if device == "cuda" and section.workers > len(machine.gpus):
        raise InputError(
            f"parallel.workers: {section.workers}, but this box has {len(machine.gpus)} GPU(s) and each worker needs its own; "
            f"at most {len(machine.gpus)}, or parallel.device: cpu"
        )
    if device == "cpu" and section.workers > machine.cores:
        return (
            section.workers,
            f"parallel.workers = {section.workers} share {machine.cores} CPU core(s): slower than fewer workers",
        )
    return section.workers, None


def budget(machine: Machine, device: Literal["cpu", "cuda"], workers: int, memory: MemorySection) -> Budget:
    """What the box has, held to the recipe's limits."""
    host = min(machine.host_memory_bytes, memory.host_limit or machine.host_memory_bytes)
    if device == "cpu":
        return Budget(0, host)
    card = round(USABLE * min(gpu.memory_bytes for gpu in machine.gpus[:workers]))
    return Budget(min(card, memory.gpu_limit or card), host)


def place(shape: ModelShape, memory: MemorySection, run: Footprint, limits: Budget, speed: Speed | None = None) -> Placement:
    """Strategy, activations and layout. `run` holds the rest; `speed`: of the card, if known. Raises DoesNotFitError."""
    tried: list[tuple[Footprint, Ledger]] = []
    for candidate in _candidates(shape, memory, run):
        needed = ledger(shape, candidate)
        if limits.shortfall(needed) <= 0:
            if candidate.strategy == "streamed":
                return _streamed(shape, memory, limits, speed, candidate, needed, tried)
            reasons = _reasons(memory, shape, candidate, needed, limits, tried)
            return Placement(candidate.strategy, candidate.activations, needed, reasons)
        tried.append((candidate, needed))
    # What misses host memory alone is told before what misses card memory: to fill the card would not help there.
    best, needed = min(
        tried, key=lambda each: (bool(limits.card) and each[1].total("card") > limits.card, limits.shortfall(each[1]))
    )
    raise DoesNotFitError(_does_not_fit(shape, best, limits, needed))


def _streamed(
    shape: ModelShape,
    memory: MemorySection,
    limits: Budget,
    speed: Speed | None,
    run: Footprint,
    needed: Ledger,
    tried: list[tuple[Footprint, Ledger]],
) -> Placement:
    """Of a streamed run that fits: as it is, or with blocks that offload where the step is known to be faster so."""

    def fitting(wanted: Footprint) -> tuple[Footprint, Ledger] | None:
        for candidate in _laid_out(shape, wanted, memory.placement):
            found = ledger(shape, candidate)
            if limits.shortfall(found) <= 0:
                return candidate, found
        return None

    offload: tuple[str, ...] = ()
    if memory.activations == "auto" and speed and speed.link and run.device == "cuda":
        better = offloading(shape, run, fitting, speed)
        if better:
            run, needed, gained = better
            share = f"one micro-batch of {run.streaming.offload_every}"
            offload = (f"blocks send to the host what backward needs of {share}: {gained:.0%} faster, simulated",)
    reasons = _reasons(memory, shape, run, needed, limits, tried)
    return Placement("streamed", run.activations, needed, (*reasons, *offload), run.streaming)


def _candidates(shape: ModelShape, memory: MemorySection, run: Footprint) -> list[Footprint]:
    strategies: tuple[StrategyName, ...]
    if memory.strategy != "auto":
        strategies = (memory.strategy,)
    elif run.workers > 1:
        strategies = (*_ORDER, "streamed")
    else:
        strategies = ("resident", "streamed")
    found: list[Footprint] = []
    for strategy in strategies:
        if strategy == "streamed":
            by_block = () if memory.activations in ("auto", "recompute") else (memory.activations,) * shape.layers
            streaming = run.streaming.model_copy(update={"activations": by_block})
            wanted = replace(run, strategy=strategy, activations="recompute", streaming=streaming)
            found += _laid_out(shape, wanted, memory.placement)
        else:
            found += [replace(run, strategy=strategy, activations=policy) for policy in _policies(memory)]
    return found


def _policies(memory: MemorySection) -> tuple[Literal["keep", "recompute"], ...]:
    """Of strategies that treat all blocks alike."""
    if memory.activations == "auto":
        return _ACTIVATIONS
    return () if memory.activations == "offload" else (memory.activations,)


def _laid_out(shape: ModelShape, run: Footprint, placement: Literal["auto"] | int = "auto") -> list[Footprint]:
    """`run` in each way that its strategy can be laid out, the best first."""
    if run.strategy == "streamed" and run.device == "cuda":
        return [replace(run, streaming=streaming) for streaming in layouts(shape, run.streaming, placement)]
    return [run]


def _reasons(
    memory: MemorySection,
    shape: ModelShape,
    run: Footprint,
    needed: Ledger,
    limits: Budget,
    tried: list[tuple[Footprint, Ledger]],
) -> tuple[str, ...]:
    strategy, activations = run.strategy, run.activations
    where, there = ("card", limits.card) if limits.card else ("host", limits.host)
    uses = f"{format_bytes(needed.total('card' if limits.card else 'host'))} of {format_bytes(there)} on the {where}"
    reasons = []
    if memory.strategy == "auto":
        reasons.append(
            f"memory.strategy = {strategy}: the least communication that fits, {uses}{_cost(shape, run, limits, tried)}"
        )
    if memory.activations == "auto":
        why = (
            "it fits" if activations == "keep" else "blocks pass through" if strategy == "streamed" else "keeping does not fit"
        )
        reasons.append(f"memory.activations = {activations}: {why}, {uses}")
    if strategy == "streamed" and memory.waves == "auto":
        reasons.append(f"memory.waves = {run.streaming.waves}: the fewest transfers")
    if strategy == "streamed" and limits.card:
        reasons.append(_placement_reason(memory, shape, run.streaming.on_card))
        if run.streaming.update == "in_backward":
            reasons.append("blocks are updated in backward: train.clip_norm is 0, so nothing waits for the norm")
    return tuple(reasons)


def _placement_reason(memory: MemorySection, shape: ModelShape, on_card: tuple[int, ...]) -> str:
    """Which units stay on the card."""
    if not on_card:
        return "memory.placement = 0: embedding and head stream as the blocks do, no room"
    blocks = len(on_card) - 2
    what = f"embedding, head and {blocks} of {shape.layers} blocks keep all their state on the card"
    why = "as many as fit" if memory.placement == "auto" else "as asked"
    return f"memory.placement = {blocks}: {what}, {why}"


def _cost(shape: ModelShape, run: Footprint, limits: Budget, tried: list[tuple[Footprint, Ledger]]) -> str:
    """What streaming on a card is instead of, and what it costs."""
    if run.strategy != "streamed" or not limits.card:
        return ""
    missing = min(limits.shortfall(needed) for other, needed in tried if other.strategy == "resident")
    up, down = traffic_bytes(shape, run)
    return (
        f" (resident is {format_bytes(missing)} short); a step moves up to {format_bytes(up)} to the card and "
        f"{format_bytes(down)} back"
    )


def _does_not_fit(shape: ModelShape, best: Footprint, limits: Budget, needs: Ledger) -> str:
    where: Literal["card", "host"] = "card" if limits.card and needs.total("card") > limits.card else "host"
    there = limits.card if where == "card" else limits.host
    needed = needs.total(where)
    parts = sorted((i for i in needs.items if i.place == where), key=lambda i: -i.size_bytes)
    lines = [
        f"{shape.name} does not fit: memory.strategy {best.strategy} with activations {best.activations} needs "
        f"{format_bytes(needed)} on {'each card' if where == 'card' else 'the host'} and there are {format_bytes(there)}: "
        f"{format_bytes(needed - there)} short",
        "parts: " + ", ".join(f"{part.part} {format_bytes(part.size_bytes)}" for part in parts),
    ]
    fits = _what_would_fit(shape, best, limits)
    lines.append(
        f"what would fit: {'; '.join(fits)}" if fits else "nothing smaller in the same recipe fits; choose a smaller model"
    )
    return "\n".join(lines)


def _what_would_fit(shape: ModelShape, run: Footprint, limits: Budget) -> list[str]:
    """Changes to a few keys of `run`, each tried with the formulas, the least change first."""
    strategies: tuple[StrategyName, ...] = _ORDER if run.workers > 1 else ("resident",)
    unit = replace(run, activations="recompute")
    changes = [
        (f"memory.strategy: {name} with memory.activations: recompute", replace(unit, strategy=name)) for name in strategies
    ]
    if run.micro_batch > 1:
        changes.append(("train.micro_batch: 1 with memory.activations: recompute", replace(unit, micro_batch=1)))
    if run.loss_chunk > 256:
        changes.append(("memory.loss_chunk: 256 with memory.activations: recompute", replace(unit, loss_chunk=256)))
    length = run.sequence_length // 2
    while length >= 256:
        changes.append(
            (f"data.sequence_length: {length} (train.micro_batch: 1)", replace(unit, micro_batch=1, sequence_length=length))
        )
        length //= 2
    fits = [text for text, footprint in changes if _fits(shape, footprint, limits)]
    if run.workers == 1 or run.device == "cuda":
        streamed = [text for text, footprint in _streamed_changes(unit) if _fits(shape, footprint, limits)]
        fits = [*streamed[:2], *fits[:1]] if run.strategy == "streamed" else [*fits[:2], *streamed[:1]]
    else:
        fits = fits[:2]
    if run.device == "cuda":
        for workers in (2, 4, 8, 16, 32, 64):
            if workers > run.workers:
                wider = replace(unit, workers=workers, strategy="zero3")
                if ledger(shape, wider).total("card") <= limits.card:
                    return [*fits, f"memory.strategy: zero3 on {workers} such cards"]
    return fits


def _fits(shape: ModelShape, run: Footprint, limits: Budget) -> bool:
    return any(limits.shortfall(ledger(shape, laid_out)) <= 0 for laid_out in _laid_out(shape, run))


def _streamed_changes(unit: Footprint) -> list[tuple[str, Footprint]]:
    """Streaming with one worker, then with narrower moments, then in more waves."""
    start = [] if unit.strategy == "streamed" else ["memory.strategy: streamed with memory.activations: recompute"]
    if unit.workers > 1:
        start.append("parallel.workers: 1")
    streamed = replace(unit, strategy="streamed", workers=1)
    changes = [(start, streamed)] if start else []
    if unit.compute != "fp64":
        widths: tuple[OptimizerState, ...] = ("fp32", "bf16", "8bit")
        for state in widths[widths.index(unit.streaming.moments) + 1 :]:
            narrower = unit.streaming.model_copy(update={"moments": state})
            changes.append(([*start, f"train.optimizer.state: {state}"], replace(streamed, streaming=narrower)))
    if not start:
        for waves in (2, 4, 8):
            if unit.streaming.waves < waves <= unit.micro_batches:
                more = unit.streaming.model_copy(update={"waves": waves})
                changes.append(([f"memory.waves: {waves}"], replace(streamed, streaming=more)))
    return [(", ".join(texts), footprint) for texts, footprint in changes]
