"""Predicts a planned run on a machine: seconds by part, memory by part, and for a streamed run its timeline and its bound.

From the Plan that the run is made of and the rates of the box, measured or from the catalogue; nothing of the run itself. The
bound is what no order of a streamed step's ops can beat (schedule.solve.least_s): all its arithmetic, or all its transfers, or
the updates before all that waits for them, without any overhead. A step that leaves the card pauses computes faster than one
that does not (Speed.busy): the share of the time that compute takes is found by simulating twice. Of several workers the one
with the most micro-batches is simulated, the others keeping pace.
"""

from __future__ import annotations

from dataclasses import dataclass

from muletrain.planner.compute import Parts, compute_time, optimizer_s, stream_rates
from muletrain.planner.footprint import Footprint
from muletrain.planner.memory import ledger
from muletrain.planner.speed import Speed, speed_of
from muletrain.planner.streamed import stream_plan
from muletrain.schedule.build import build
from muletrain.schedule.ops import Schedule, StepShape
from muletrain.schedule.rates import Rates
from muletrain.schedule.simulate import Timeline, simulate
from muletrain.schedule.solve import least_s
from muletrain.schedule.timeline import TimelineRecord, timeline_record
from muletrain.spec.errors import InputError
from muletrain.spec.ledger import Ledger
from muletrain.spec.machine import Machine
from muletrain.spec.model_shape import ModelShape
from muletrain.spec.plan import ExpectedPlan, Plan


@dataclass(frozen=True)
class Prediction:
    """One step of one worker among many alike."""

    tokens: int
    """Positions in a step, over all workers."""
    step_s: float
    bound_s: float
    """Streamed: of any order of the same ops, updates before what waits for them. Resident: the step itself."""
    resource_bound_s: float
    """Streamed: of the busiest resource alone, whatever waits for what."""
    time_s: dict[str, float]
    """By part, without overlap: matmul, attention, elementwise, launch, update; streamed also what compute waits for."""
    ledger: Ledger
    source: str
    """Of the rates."""
    timeline: TimelineRecord | None
    """Streamed only."""

    @property
    def tokens_per_s(self) -> float:
        """Positions, not trained tokens: padding is not known before the data is."""
        return self.tokens / self.step_s


def footprint(plan: Plan) -> Footprint:
    """What memory and time of a plan depend on."""
    return Footprint(
        strategy=plan.memory.strategy,
        activations=plan.memory.activations,
        compute=plan.precision.compute,
        compiled=plan.train.compile,
        device=plan.parallel.device,
        workers=plan.parallel.workers,
        micro_batch=plan.train.micro_batch,
        micro_batches=plan.train.micro_batches,
        sequence_length=plan.data.sequence_length,
        loss_chunk=plan.memory.loss_chunk,
        streaming=plan.memory.streaming,
        adapter=plan.model.adapter,
    )


def with_expectation(plan: Plan, machine: Machine) -> Plan:
    """`plan` with what it is expected to do; unchanged where that is not known."""
    try:
        found = predict(plan, machine)
    except InputError:
        return plan
    return plan.model_copy(update={"expected": ExpectedPlan(tokens_per_s=found.tokens_per_s, source=found.source)})


def predict(plan: Plan, machine: Machine) -> Prediction:
    """Of resident runs of one worker and streamed ones of any number. Raises InputError for others, or without rates."""
    run, shape = footprint(plan), plan.model.shape
    streamed = run.strategy == "streamed" and run.device == "cuda"
    if not streamed and (run.workers > 1 or run.strategy not in ("resident", "streamed")):
        raise InputError(
            f"memory.strategy: the time of {run.strategy} on {run.workers} workers is not predicted; streamed on GPUs is, and "
            "resident and streamed with parallel.workers: 1 are"
        )
    speed = speed_of(machine if run.device == "cuda" else machine.model_copy(update={"gpus": ()}), run.compute)
    if streamed:
        return _streamed(plan, run, speed if run.workers == 1 else speed.among(run.workers, machine))
    parts = compute_time(shape, run, speed.busy(1.0))
    update_s = optimizer_s(run.adapter.parameters or shape.parameters, run, speed)
    step_s = parts.total_s + update_s
    return Prediction(
        tokens=plan.tokens_per_step,
        step_s=step_s,
        bound_s=step_s,
        resource_bound_s=step_s,
        time_s={**_named(parts), "update": update_s},
        ledger=ledger(shape, run),
        source=speed.source,
        timeline=None,
    )


@dataclass(frozen=True)
class StreamedStep:
    """A simulated step of a streamed run."""

    schedule: Schedule
    rates: Rates
    line: Timeline
    speed: Speed
    """With what the step leaves of pauses."""


def streamed_timeline(shape: ModelShape, run: Footprint, speed: Speed) -> StreamedStep:
    """One step among many."""
    layout = stream_plan(shape, run)
    step = StepShape(
        micro_batches=(run.tokens,) * run.rounds,
        sequence_length=run.sequence_length,
        pending=layout.update == "next_fetch",
        mode="train",
    )
    schedule = build(layout, step)
    first = simulate(schedule, stream_rates(shape, run, speed))
    slowed = speed.busy(first.busy_s["compute"] / first.step_s)
    rates = stream_rates(shape, run, slowed)
    line = first if slowed == speed else simulate(schedule, rates)
    return StreamedStep(schedule, rates, line, slowed)


def _streamed(plan: Plan, run: Footprint, speed: Speed) -> Prediction:
    shape = plan.model.shape
    found = streamed_timeline(shape, run, speed)
    schedule, line = found.schedule, found.line
    parts = compute_time(shape, run, found.speed)
    return Prediction(
        tokens=plan.tokens_per_step,
        step_s=line.step_s,
        bound_s=max(line.bound_s, least_s(schedule.plan, schedule.step, found.rates)),
        resource_bound_s=line.bound_s,
        time_s={**_named(parts), "update": line.busy_s["update"], "waiting": line.exposed_s},
        ledger=ledger(shape, run),
        source=speed.source,
        timeline=timeline_record("simulated", line.tokens, zip(schedule.ops, line.start, line.end, strict=True)),
    )


def _named(parts: Parts) -> dict[str, float]:
    return {
        "matmul": parts.matmul_s,
        "attention": parts.attention_s,
        "elementwise": parts.elementwise_s,
        "launch": parts.launch_s,
    }
