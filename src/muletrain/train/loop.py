"""THE train loop, one for every strategy.

It knows a strategy only by its contract, counts what was applied, and calls hooks in their declared order at three moments:
the start, after each step, the end. What a hook does, it does on all workers, so hooks may be collective.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch.distributed as dist

from muletrain.checkpoint.progress import Progress
from muletrain.data.batch import MicroBatch
from muletrain.metrics.communication import CommunicationMeter
from muletrain.metrics.compilation import compile_seconds
from muletrain.metrics.meter import Meter
from muletrain.optim.schedule import learning_rate
from muletrain.spec.errors import WorkerFailedError
from muletrain.spec.plan import Plan
from muletrain.strategy.contract import NonFiniteError, StepContext, StepResult, Strategy
from muletrain.train.signs import Signs
from muletrain.train.stop import Shared, StopFlag, exchange

Outcome = Literal["finished", "stopped", "failed"]
MOST_SKIPS = 50
"""Skipped steps in a row that end a run: the loss scale has had every chance by then."""


class Stream(Protocol):
    """What the loop asks of the data: see data.stream.TrainingStream."""

    @property
    def windows_per_epoch(self) -> int:
        """Windows (global batches) in one pass over the data."""

    def window(self, window: int, worker: int, workers: int) -> Sequence[MicroBatch]:
        """This worker's micro-batches of a window, counted over all epochs; the same number on every worker."""


@dataclass(frozen=True)
class Step:
    """One step as it happened."""

    result: StepResult
    shared: Shared
    learning_rate: float
    seconds: float
    """Wall time."""
    compile_s: float
    """Of it, in torch.compile: a shape that was new. Not in any speed."""
    parts_s: dict[str, float]

    @property
    def work_s(self) -> float:
        """Wall time without compilation: what speeds go by."""
        return self.seconds - self.compile_s


@dataclass
class Run:
    """A session under way: what hooks read, and the counters that only the loop moves."""

    plan: Plan
    strategy: Strategy
    stream: Stream
    progress: Progress
    worker: int
    workers: int
    stop_after: int = 0
    """End this session as a signal would after so many updates; 0: no."""
    resumed: bool = False
    meter: Meter = field(default_factory=Meter)
    stop: StopFlag = field(default_factory=StopFlag)
    signs: Signs = field(default_factory=Signs)
    stopping: bool = False
    started_at: int = field(init=False)

    def __post_init__(self) -> None:
        self.started_at = self.progress.update

    @property
    def total_updates(self) -> int:
        """Updates of the whole run: the schedule's length and the end of the bar."""
        train = self.plan.train
        by_epochs = train.epochs * self.stream.windows_per_epoch
        return min(train.steps, by_epochs) if train.steps and by_epochs else train.steps or by_epochs

    @property
    def last_update(self) -> int:
        """Where this session ends: the run's end, or earlier with `stop_after`."""
        return min(self.total_updates, self.started_at + self.stop_after) if self.stop_after else self.total_updates

    @property
    def finished(self) -> bool:
        """Enough updates, or enough passes over the data, whichever came first."""
        train, progress = self.plan.train, self.progress
        by_steps = bool(train.steps) and progress.update >= train.steps
        return by_steps or (bool(train.epochs) and progress.window >= train.epochs * self.stream.windows_per_epoch)


class Hook(Protocol):
    """Something that happens beside training. All workers call every moment, in the order in which hooks are declared."""

    def start(self, run: Run) -> None:
        """Before the first step of the session."""

    def after_step(self, run: Run, step: Step) -> None:
        """After each step, applied or skipped; run.stopping says whether it was the session's last."""

    def end(self, run: Run, outcome: Outcome) -> None:
        """After the last step. With "failed" other workers may be gone: nothing collective then."""


def train(run: Run, hooks: Sequence[Hook]) -> Outcome:
    """Steps until the run is finished or asked to stop. Collective. Raises what a step or hook raises, after the hooks' end."""
    meter = CommunicationMeter()
    skips = 0
    try:
        for hook in hooks:
            hook.start(run)
        while not run.finished and not run.stopping:
            step = _step(run, meter)
            run.signs.show(f"what follows step {run.progress.update}")
            skips = skips + 1 if step.result.skipped else 0
            for hook in hooks:
                hook.after_step(run, step)
            if skips >= MOST_SKIPS:
                raise WorkerFailedError(_many_skips(step))
        outcome: Outcome = "finished" if run.finished else "stopped"
        for hook in hooks:
            hook.end(run, outcome)
    except BaseException:
        for hook in hooks:
            hook.end(run, "failed")
        raise
    return outcome


def _step(run: Run, meter: CommunicationMeter) -> Step:
    start, compiled = time.perf_counter(), compile_seconds()
    progress = run.progress
    number = progress.update + 1
    run.signs.show(f"reading the data of step {number}", step=True)
    batches = run.stream.window(progress.window, run.worker, run.workers)
    data_s = time.perf_counter() - start
    optimizer = run.plan.train.optimizer
    rate = learning_rate(run.plan.train.schedule, optimizer.learning_rate, run.total_updates, progress.update)
    run.signs.show(f"computing step {number}", step=True)
    try:
        result = run.strategy.step(batches, StepContext(progress.update, progress.window, rate))
    except NonFiniteError as error:
        raise WorkerFailedError(_not_finite(run, batches, error)) from error
    padding = sum(batch.padding_tokens for batch in batches if batch.index >= 0)  # fillers are no data
    run.signs.show(f"step {number} is done here; waiting for the others", step=True)
    shared = exchange(run.stop.raised, padding, run.strategy.peak_memory_bytes(), meter)
    seconds, compile_s = time.perf_counter() - start, compile_seconds() - compiled
    run.signs.took(seconds)
    _count(run, result)
    step = Step(result, shared, rate, seconds, compile_s, _parts(result, data_s, meter.take(), compile_s, seconds))
    run.meter.step(0 if result.skipped else result.tokens, step.work_s)
    session_updates = run.progress.update - run.started_at
    run.stopping = shared.stop or (run.stop_after > 0 and session_updates >= run.stop_after)
    return step


def _count(run: Run, result: StepResult) -> None:
    """A skipped step moves the position in the data and nothing else: not the updates, the rate, or the trained tokens."""
    progress = run.progress
    changes = {"window": progress.window + 1}
    if result.skipped:
        changes["skipped"] = progress.skipped + 1
    else:
        changes |= {"update": progress.update + 1, "tokens": progress.tokens + result.tokens}
    run.progress = progress.model_copy(update=changes)


def _parts(result: StepResult, data_s: float, exchange_s: float, compile_s: float, seconds: float) -> dict[str, float]:
    parts = dict(result.parts_s)
    if compile_s:  # happens inside the forward or backward, so inside "compute"
        parts["compile"] = compile_s
        parts["compute"] = max(0.0, parts.get("compute", 0.0) - compile_s)
    parts["data"] = data_s
    parts["communication"] = parts.get("communication", 0.0) + exchange_s
    parts["other"] = max(0.0, seconds - sum(parts.values()))
    return parts


def _not_finite(run: Run, batches: Sequence[MicroBatch], error: NonFiniteError) -> str:
    """Every worker raised, so all can still gather the rows of the whole window."""
    rows = [row for batch in batches for row in batch.sample_ids]
    if run.workers > 1:
        gathered: list[list[int]] = [[] for _ in range(run.workers)]
        dist.all_gather_object(gathered, rows)
        rows = [row for part in gathered for row in part]
    return (
        f"step {run.progress.update + 1} (window {run.progress.window}): {error}. The step was not applied and no checkpoint "
        f"was touched. Packed rows of this window: {', '.join(map(str, sorted(set(rows))))}. Look at them with mule data "
        "inspect; a lower train.optimizer.learning_rate or more train.schedule.warmup_steps helps if the loss was rising before"
    )


def _many_skips(step: Step) -> str:
    return (
        f"{MOST_SKIPS} steps in a row were skipped (the last with a loss scale of {step.result.loss_scale:g} and "
        f"{step.result.tokens} trained tokens). With precision.compute=fp16 this model overflows at any scale: use bf16. "
        "Without trained tokens, look at the data with mule data inspect"
    )
