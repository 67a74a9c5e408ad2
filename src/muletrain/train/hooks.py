"""What happens beside training, in this order at each moment: events, evaluation, checkpoint, profile, record.

Each hook is one concern with its own state. The order matters: a checkpoint holds what the evaluation before it left untouched,
and the record is written when everything else has happened.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from muletrain.checkpoint.save import ModelWriter, save
from muletrain.checkpoint.together import CheckpointError
from muletrain.data.batch import MicroBatch
from muletrain.metrics.events import EventSink
from muletrain.metrics.meter import hardware_over_model_flops, model_flops_utilisation
from muletrain.spec.events import CheckpointEvent, EvaluationEvent, SessionEvent, StepEvent, WarningEvent
from muletrain.spec.value import Value
from muletrain.train.console import Console
from muletrain.train.evaluate import evaluate
from muletrain.train.loop import Outcome, Run, Step


@dataclass
class Log:
    """Where events go: the file (worker 0 only; None elsewhere) and the console."""

    sink: EventSink | None
    console: Console

    def write(self, event: Value) -> None:
        """Writes an event on worker 0."""
        if self.sink is not None:
            self.sink.write(event)

    def warn(self, step: int, message: str) -> None:
        """Tells the user, and the file."""
        if self.sink is not None:
            self.console.warn(message)
            self.sink.write(WarningEvent(step=step, message=message))

    def close(self) -> None:
        """Ends the bar and the file."""
        self.console.end()
        if self.sink is not None:
            self.sink.close()


class HookBase:
    """A hook that does nothing at any moment."""

    def start(self, run: Run) -> None:
        """See Hook."""

    def after_step(self, run: Run, step: Step) -> None:
        """See Hook."""

    def end(self, run: Run, outcome: Outcome) -> None:
        """See Hook."""


class Events(HookBase):
    """Step and session events."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def start(self, run: Run) -> None:
        """Says what starts."""
        self._log.console.start(run)
        kind: Literal["start", "resume"] = "resume" if run.resumed else "start"
        self._log.write(session_event(run, kind, "continues from a checkpoint" if run.resumed else "new run"))

    def after_step(self, run: Run, step: Step) -> None:
        """The console's line; one event every log.every steps; every skipped step."""
        event = step_event(run, step)
        self._log.console.step(run, event)
        if run.progress.update % run.plan.log.every == 0 or event.skipped:
            self._log.write(event)


def session_event(run: Run, kind: Literal["start", "resume", "end"], reason: str) -> SessionEvent:
    """A beginning or an end of this session."""
    return SessionEvent(
        kind=kind,
        step=run.progress.update,
        reason=reason,
        workers=run.workers,
        strategy=run.plan.memory.strategy,
        device=device_name(run.plan.parallel.device),
        versions={"python": platform.python_version(), "torch": str(torch.__version__)},
    )


def device_name(device: str) -> str:
    """The card's or the processor's name."""
    return torch.cuda.get_device_name() if device == "cuda" else f"cpu ({platform.machine()})"


def step_event(run: Run, step: Step) -> StepEvent:
    """The step as an event, with this session's speed."""
    plan, result, progress = run.plan, step.result, run.progress
    speed = 0.0 if result.skipped else result.tokens / step.work_s
    length = plan.data.sequence_length
    adapter = plan.model.adapter.parameters
    mfu = model_flops_utilisation(plan.model.shape, length, speed, run.workers, plan.parallel.peak_flops, adapter)
    over = hardware_over_model_flops(plan.model.shape, length, plan.memory.activations == "recompute", adapter)
    return StepEvent(
        step=progress.update,
        window=progress.window,
        epoch=(progress.window - 1) // run.stream.windows_per_epoch,
        loss=result.loss_sum / result.tokens if result.tokens else None,
        grad_norm=result.norm,
        learning_rate=step.learning_rate,
        tokens=result.tokens,
        padding_tokens=step.shared.padding_tokens,
        tokens_per_s=speed,
        step_s=step.seconds,
        skipped=result.skipped,
        loss_scale=result.loss_scale,
        parts_s=step.parts_s,
        memory_bytes=step.shared.memory_bytes,
        model_flops_utilisation=mfu,
        hardware_flops_utilisation=mfu * over if mfu else None,
    )


class Evaluation(HookBase):
    """Held-out loss every train.evaluate_every updates, and at the end of the run."""

    def __init__(self, batches: Sequence[MicroBatch], text_bytes: int, log: Log) -> None:
        self._batches, self._text_bytes, self._log = batches, text_bytes, log
        self.last: EvaluationEvent | None = None

    def after_step(self, run: Run, step: Step) -> None:
        """Evaluates when it is time; a skipped step changed nothing, and a stop should not wait."""
        every = run.plan.train.evaluate_every
        if every and run.progress.update % every == 0 and not step.result.skipped and not run.stopping:
            self._evaluate(run)

    def end(self, run: Run, outcome: Outcome) -> None:
        """Evaluates what the run ends with."""
        if outcome == "finished" and (self.last is None or self.last.step != run.progress.update):
            self._evaluate(run)

    def _evaluate(self, run: Run) -> None:
        if not self._text_bytes:
            return
        run.signs.show(f"evaluating after step {run.progress.update}")
        run.strategy.flush()
        self.last = evaluate(run.strategy, self._batches, self._text_bytes, run.progress.update)
        run.meter.other(self.last.seconds)
        self._log.write(self.last)
        self._log.console.evaluation(self.last)


class Checkpointing(HookBase):
    """Saves every checkpoint.every updates and when the session ends.

    A periodic save that fails is a warning, and training goes on to try again; one that fails at the end fails the run.
    """

    def __init__(self, root: Path, write_model: ModelWriter, log: Log, at: tuple[int, int] | None) -> None:
        """`at` is the (update, window) that is on disk already: the one resumed from."""
        self._root, self._write_model, self._log, self._saved = root, write_model, log, at

    def after_step(self, run: Run, step: Step) -> None:
        """Saves when it is time."""
        every = run.plan.checkpoint.every
        last = run.stopping or run.finished  # then `end` saves, after the evaluation
        if every and run.progress.update % every == 0 and not step.result.skipped and not last:
            try:
                self._save(run)
            except CheckpointError as error:
                self._log.warn(run.progress.update, f"{error}. Training goes on")

    def end(self, run: Run, outcome: Outcome) -> None:
        """Saves what the session ends with. A failed one has nothing to save: good checkpoints stay."""
        if outcome != "failed" and self._saved != (run.progress.update, run.progress.window):
            self._save(run)

    def _save(self, run: Run) -> None:
        run.signs.show(f"saving after step {run.progress.update}")
        saved = save(self._root, run.strategy, run.progress, self._write_model, run.plan.checkpoint.keep)
        self._saved = (run.progress.update, run.progress.window)
        run.meter.other(saved.seconds)
        event = CheckpointEvent(
            step=run.progress.update,
            path=str(saved.path.relative_to(self._root.parent)),
            seconds=saved.seconds,
            size_bytes=saved.size_bytes,
        )
        self._log.write(event)
        self._log.console.checkpoint(event)
