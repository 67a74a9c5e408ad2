"""Which device, how many workers, which strategy: rules in a fixed order, no search.

auto takes the strategy with the least communication that fits, and within it keeps activations if that fits: on cards joined by
PCIe a gathered block costs more time than a recomputed one. Strategies in that order: resident, zero1, zero2, zero3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from muletrain.planner.memory import Footprint, ledger
from muletrain.spec.errors import DoesNotFitError, InputError
from muletrain.spec.ledger import Ledger
from muletrain.spec.machine import Machine
from muletrain.spec.model_shape import ModelShape
from muletrain.spec.recipe import MemorySection, ParallelSection, StrategyName
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


def choose_workers(
    section: ParallelSection, device: Literal["cpu", "cuda"], machine: Machine, memory: MemorySection
) -> tuple[int, str | None]:
    """The number of workers, and why if that was open. Raises InputError for more workers than GPUs."""
    if section.workers == "auto":
        if device == "cpu" or memory.strategy == "streamed":
            return 1, f"parallel.workers = 1: {'one on a CPU' if device == 'cpu' else 'streamed runs one'}"
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


def place(shape: ModelShape, memory: MemorySection, run: Footprint, limits: Budget) -> Placement:
    """Strategy and activations. `run` holds the rest. Raises InputError for a strategy not built, DoesNotFitError."""
    if memory.strategy == "streamed":
        _check_streamed(run)
    tried: list[Placement] = []
    for strategy, activations in _candidates(memory, run):
        needed = ledger(shape, replace(run, strategy=strategy, activations=activations))
        placement = Placement(strategy, activations, needed, _reasons(memory, strategy, activations, needed, limits))
        if limits.shortfall(needed) <= 0:
            return placement
        tried.append(placement)
    best = min(tried, key=lambda placement: limits.shortfall(placement.ledger))
    raise DoesNotFitError(_does_not_fit(shape, run, limits, best))


def _check_streamed(run: Footprint) -> None:
    if run.device == "cuda" or run.workers > 1:
        raise InputError(
            f"memory.strategy: streamed runs on the CPU with one worker in this version, not on {run.workers} x {run.device}; "
            "set parallel.device: cpu and parallel.workers: 1, or memory.strategy: zero3"
        )


def _candidates(memory: MemorySection, run: Footprint) -> list[tuple[StrategyName, Literal["keep", "recompute"]]]:
    strategies: tuple[StrategyName, ...]
    if memory.strategy != "auto":
        strategies = (memory.strategy,)
    elif run.workers > 1:
        strategies = _ORDER
    else:
        strategies = ("resident", "streamed") if run.device == "cpu" else ("resident",)
    policies = _ACTIVATIONS if memory.activations == "auto" else (memory.activations,)
    pairs = [(strategy, policy) for strategy in strategies for policy in policies]
    return [pair for pair in pairs if pair != ("streamed", "keep")]  # streamed recomputes every block


def _reasons(
    memory: MemorySection, strategy: StrategyName, activations: Literal["keep", "recompute"], needed: Ledger, limits: Budget
) -> tuple[str, ...]:
    where, there = ("card", limits.card) if limits.card else ("host", limits.host)
    uses = f"{format_bytes(needed.total('card' if limits.card else 'host'))} of {format_bytes(there)} on the {where}"
    reasons = []
    if memory.strategy == "auto":
        reasons.append(f"memory.strategy = {strategy}: the least communication that fits, {uses}")
    if memory.activations == "auto":
        why = (
            "it fits" if activations == "keep" else "streamed always does" if strategy == "streamed" else "keeping does not fit"
        )
        reasons.append(f"memory.activations = {activations}: {why}, {uses}")
    return tuple(reasons)


def _does_not_fit(shape: ModelShape, run: Footprint, limits: Budget, best: Placement) -> str:
    where: Literal["card", "host"] = "card" if limits.card and best.ledger.total("card") > limits.card else "host"
    there = limits.card if where == "card" else limits.host
    needed = best.ledger.total(where)
    parts = sorted((i for i in best.ledger.items if i.place == where), key=lambda i: -i.size_bytes)
    lines = [
        f"{shape.name} does not fit: memory.strategy {best.strategy} with activations {best.activations} needs "
        f"{format_bytes(needed)} on {'each card' if where == 'card' else 'the host'} and there are {format_bytes(there)}: "
        f"{format_bytes(needed - there)} short",
        "parts: " + ", ".join(f"{part.part} {format_bytes(part.size_bytes)}" for part in parts),
    ]
    fits = _what_would_fit(shape, run, limits, best)
    lines.append(
        f"what would fit: {'; '.join(fits)}" if fits else "nothing smaller in the same recipe fits; choose a smaller model"
    )
    return "\n".join(lines)


def _what_would_fit(shape: ModelShape, run: Footprint, limits: Budget, best: Placement) -> list[str]:
    """Changes to one or two keys, each tried with the formulas, the least change first."""
    strategies: tuple[StrategyName, ...] = _ORDER if run.workers > 1 else ("resident",)
    if run.device == "cpu" and run.workers == 1:
        strategies = ("resident", "streamed")
    unit = replace(run, strategy=best.strategy, activations="recompute")
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
    fits = [text for text, footprint in changes if limits.shortfall(ledger(shape, footprint)) <= 0][:2]
    if run.device == "cuda":
        for workers in (2, 4, 8, 16, 32, 64):
            if workers > run.workers:
                wider = replace(unit, workers=workers, strategy="zero3")
                if ledger(shape, wider).total("card") <= limits.card:
                    return [*fits, f"memory.strategy: zero3 on {workers} such cards"]
    return fits
