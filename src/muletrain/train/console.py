"""What a person sees of a run: a bar on a terminal, plain lines elsewhere, or nothing. Worker 0 only.

A bar in a log file is a flood of control characters, so it is for terminals; the planner has decided which.
"""

from __future__ import annotations

import sys
from typing import Literal

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from muletrain.spec.events import CheckpointEvent, EvaluationEvent, StepEvent
from muletrain.spec.units import format_bytes, format_count, format_duration
from muletrain.train.loop import Run

Mode = Literal["bar", "plain", "quiet"]


class Console:
    """Shows progress. Warnings are shown in every mode, on stderr."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._rich = RichConsole(highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def start(self, run: Run) -> None:
        """Begins the bar where the run stands."""
        if self._mode != "bar":
            return
        self._bar = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"), console=self._rich
        )
        self._task = self._bar.add_task("", total=run.total_updates, completed=run.progress.update, facts="")
        self._bar.start()

    def say(self, text: str) -> None:
        """A line, unless quiet."""
        if self._mode != "quiet":
            self._rich.print(text, markup=False)

    def warn(self, text: str) -> None:
        """A line on stderr, always."""
        if self._bar is not None:
            self._bar.console.print(f"warning: {text}", markup=False)
        else:
            sys.stderr.write(f"warning: {text}\n")

    def step(self, run: Run, event: StepEvent) -> None:
        """Moves the bar, or prints a line every log.every steps."""
        facts = _facts(run, event)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=event.step, facts=facts)
        elif event.skipped:
            self.say(f"step {event.step}: skipped (overflow or nothing to train on), loss scale {event.loss_scale:g}")
        elif event.step % run.plan.log.every == 0:
            self.say(f"step {event.step}/{run.total_updates}  {facts}")

    def evaluation(self, event: EvaluationEvent) -> None:
        """The held-out loss."""
        self.say(
            f"step {event.step}: held-out loss {event.loss:.4f}, {event.bits_per_byte:.3f} bits a byte, {event.seconds:.1f}s"
        )

    def checkpoint(self, event: CheckpointEvent) -> None:
        """What was saved."""
        self.say(f"step {event.step}: saved {event.path} ({format_bytes(event.size_bytes)}, {event.seconds:.1f}s)")

    def end(self) -> None:
        """Leaves the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _facts(run: Run, event: StepEvent) -> str:
    mfu = event.model_flops_utilisation or 0.0
    left = run.meter.remaining_s(run.last_update - event.step)
    shown = [
        f"loss {event.loss:.4f}" if event.loss is not None else "",
        f"norm {event.grad_norm:.3g}" if event.grad_norm is not None else "",
        f"lr {event.learning_rate:.3g}",
        f"{format_count(run.meter.recent_tokens_per_s)} tokens/s",
        f"{100 * mfu:.0f}% MFU" if mfu >= 0.01 else "",
        f"ETA {format_duration(left)}" if left is not None else "",
    ]
    return "  ".join(fact for fact in shown if fact)
