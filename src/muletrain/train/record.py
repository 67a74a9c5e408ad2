"""The last hooks: the communication profile of a GPU run, and the record that sums the session up when all else is done."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from muletrain.metrics.communication import device_intervals, exposed_and_overlapped
from muletrain.spec.events import RunRecord, StepEvent
from muletrain.train.hooks import Evaluation, HookBase, Log, device_name, session_event, step_event
from muletrain.train.loop import Outcome, Run, Step

_PROFILE_FIRST = 3
"""Steps before a profile: caches and clocks settle."""


class CommunicationProfile(HookBase):
    """Exposed and overlapped communication on a GPU's own timeline, over a few steps; None until they are done.

    Only for a run that asks for it: a profiled step is slower than others, so whoever asks leaves the first steps out.
    """

    def __init__(self, steps: int) -> None:
        self._left = steps if torch.cuda.is_available() else 0
        self._profiler: Any = None
        self._started = 0.0
        self.exposed: float | None = None
        self.overlapped: float | None = None

    def after_step(self, run: Run, step: Step) -> None:  # noqa: ARG002 - the hook's signature
        """Starts after the first steps, ends after the steps asked for."""
        if self._profiler is not None:
            self._left -= 1
            if self._left == 0:
                self._finish(copies=run.plan.memory.strategy == "streamed")
        elif self._left and run.meter.steps >= _PROFILE_FIRST:
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)
            self._profiler.start()
            torch.cuda.synchronize()
            self._started = time.perf_counter()

    def _finish(self, *, copies: bool) -> None:
        torch.cuda.synchronize()
        seconds = time.perf_counter() - self._started
        self._profiler.stop()
        exposed, overlapped = exposed_and_overlapped(*device_intervals(self._profiler.events(), copies=copies))
        self.exposed, self.overlapped = exposed / seconds, overlapped / seconds
        self._profiler = None


class Record(HookBase):
    """Writes record.json and the session's last event. An old record goes at the start: it is of another session."""

    def __init__(self, path: Path, log: Log, evaluation: Evaluation, profile: CommunicationProfile) -> None:
        self._path, self._log, self._evaluation, self._profile = path, log, evaluation, profile
        self._last: StepEvent | None = None
        self._memory_bytes = 0
        self._first: tuple[float, float] | None = None
        """(waited, worked) in the first step, in seconds: it warms up, and counts only if it is the only one."""
        self._waited_s = self._worked_s = 0.0
        """In all others."""

    def start(self, run: Run) -> None:
        """Clears the place of the record."""
        if run.worker == 0:
            self._path.unlink(missing_ok=True)
            run.signs.leave(self._summary(run, "failed"))

    def after_step(self, run: Run, step: Step) -> None:
        """Keeps what the summary needs, and leaves it to the launcher should this worker be killed."""
        self._last = step_event(run, step)
        self._memory_bytes = max(self._memory_bytes, step.shared.memory_bytes)
        waited = step.parts_s["communication"]
        if self._first is None:
            self._first = waited, step.work_s
        else:
            self._waited_s, self._worked_s = self._waited_s + waited, self._worked_s + step.work_s
        if run.worker == 0:
            run.signs.leave(self._summary(run, "failed"))

    def end(self, run: Run, outcome: Outcome) -> None:
        """Writes the summary on worker 0."""
        if run.worker != 0:
            return
        self._log.write(session_event(run, "end", outcome))
        record = self._summary(run, outcome)
        try:
            temporary = self._path.with_suffix(".partial")
            temporary.write_text(record.to_json(), encoding="utf-8")
            temporary.replace(self._path)
        except OSError as error:  # the model is saved by now: a full disk must not make a failure of it
            self._log.warn(run.progress.update, f"{self._path} cannot be written ({error.strerror})")
        run.signs.recorded()

    def _summary(self, run: Run, outcome: Outcome) -> RunRecord:
        exposed, overlapped = self._communication(run)
        evaluation = self._evaluation.last
        expected = run.plan.expected.tokens_per_s
        return RunRecord(
            outcome=outcome,
            steps=run.progress.update,
            skipped=run.progress.skipped,
            tokens=run.meter.tokens,
            seconds=run.meter.step_seconds,
            tokens_per_s=run.meter.tokens_per_s,
            final_loss=self._last.loss if self._last else None,
            evaluation_loss=evaluation.loss if evaluation else None,
            bits_per_byte=evaluation.bits_per_byte if evaluation else None,
            peak_memory_bytes=self._memory_bytes,
            planned_memory_bytes=run.plan.memory.ledger.total("card") or None,
            predicted_tokens_per_s=expected or None,
            of_predicted_speed=run.meter.tokens_per_s / expected if expected and run.meter.tokens_per_s else None,
            communication_exposed=exposed,
            communication_overlapped=overlapped,
            workers=run.workers,
            strategy=run.plan.memory.strategy,
            device=device_name(run.plan.parallel.device),
        )

    def _communication(self, run: Run) -> tuple[float | None, float | None]:
        if run.workers == 1:
            return None, None
        if run.plan.parallel.device == "cuda":
            return self._profile.exposed, self._profile.overlapped
        waited, worked = (self._waited_s, self._worked_s) if self._worked_s else self._first or (0.0, 0.0)
        return (waited / worked if worked else None), None
