"""Events: what happened, one JSON object a line in `events.jsonl`, and the record that sums a run up.

Values are global (over all workers) and of this session. A quantity that was not measured is absent, never 0.
"""

from __future__ import annotations

from typing import Literal

from muletrain.spec.value import Value


class StepEvent(Value):
    """One optimizer step."""

    kind: Literal["step"] = "step"
    step: int
    """Applied updates after this step (a skipped step repeats the number)."""
    window: int
    """Position in the data: windows (global batches) consumed after this step, over all epochs."""
    epoch: int
    loss: float | None = None
    """Mean over trained tokens of the whole step, all workers. Absent where it is no number (nothing to train on)."""
    grad_norm: float | None = None
    """Global norm of the gradient of that mean loss, before clipping, unscaled. Absent on a skipped step that overflowed."""
    learning_rate: float
    tokens: int
    """Trained tokens (targets) in the step, all workers, without padding."""
    padding_tokens: int
    tokens_per_s: float
    step_s: float
    skipped: bool
    loss_scale: float
    """1 without fp16."""
    parts_s: dict[str, float]
    """Seconds by part, of worker 0: data, compute, communication (exposed wait), update, other."""
    memory_bytes: int
    """Peak so far of the worker with the most: card memory on a GPU, process memory on a CPU."""
    model_flops_utilisation: float | None = None
    """Model FLOPs over the device's dense peak for the dtype; absent where no peak is known."""
    hardware_flops_utilisation: float | None = None
    """The same with recomputed FLOPs counted."""


class EvaluationEvent(Value):
    """One evaluation on held-out documents."""

    kind: Literal["evaluation"] = "evaluation"
    step: int
    loss: float
    """Nats a token."""
    tokens: int
    bits_per_byte: float
    """Loss over the UTF-8 bytes of the same text."""
    seconds: float


class CheckpointEvent(Value):
    """A complete checkpoint was published."""

    kind: Literal["checkpoint"] = "checkpoint"
    step: int
    path: str
    seconds: float
    size_bytes: int


class SessionEvent(Value):
    """A start, a resume or an end, and why."""

    kind: Literal["start", "resume", "end"]
    step: int
    reason: str
    workers: int
    strategy: str
    device: str
    versions: dict[str, str]


class WarningEvent(Value):
    """Something the user should know; also shown on the console."""

    kind: Literal["warning"] = "warning"
    step: int
    message: str


class RunRecord(Value):
    """The summary of one session of a run, written at its end."""

    schema_version: int = 1
    outcome: Literal["finished", "stopped", "failed"]
    steps: int
    """Applied updates in all sessions so far."""
    skipped: int
    tokens: int
    """Trained tokens in this session."""
    seconds: float
    """Wall time of this session's steps, without start-up, dry batch and compilation."""
    tokens_per_s: float
    final_loss: float | None = None
    evaluation_loss: float | None = None
    bits_per_byte: float | None = None
    peak_memory_bytes: int
    """Of the worker with the most."""
    planned_memory_bytes: int | None = None
    """Of a worker's card, context included; absent on a CPU, where memory is of all workers together."""
    predicted_tokens_per_s: float | None = None
    """By the plan, before the run, in positions; absent where no rates were known."""
    of_predicted_speed: float | None = None
    """tokens_per_s over that."""
    communication_exposed: float | None = None
    """Exposed wait on transfers over step time, 0 to 1; absent for one worker."""
    communication_overlapped: float | None = None
    """Transfer time hidden behind compute over step time; absent where it cannot be measured (gloo)."""
    workers: int
    strategy: str
    device: str
