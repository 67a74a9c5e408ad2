"""The seam between the train loop and where memory lives.

The loop knows only this. It hands a strategy the micro-batches of one step that are this worker's, and never calls backward
itself: a loop that did would shut out strategies that go through the model block by block over all micro-batches (streamed).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from muletrain.data.batch import MicroBatch


@dataclass(frozen=True)
class StepContext:
    """What a step needs beside its data."""

    update: int
    """Applied updates before this step, from 0: what bias corrections and the learning rate go by."""
    window: int
    """Which global batch this is, from 0 over all epochs: what randomness is keyed by."""
    learning_rate: float


@dataclass(frozen=True)
class StepResult:
    """Global values, the same on every worker."""

    loss_sum: float
    """Sum of the loss over trained tokens, nats."""
    tokens: int
    """Trained tokens."""
    norm: float
    """Global L2 norm of the gradient of loss_sum / tokens, unscaled and before clipping."""
    skipped: bool
    """No update was made: a value was not finite under a loss scale, or the step had no trained token."""
    loss_scale: float
    parts_s: dict[str, float]
    """Seconds of this worker by part: compute, communication (exposed wait), update."""


class NonFiniteError(RuntimeError):
    """A loss or gradient is not finite and no loss scale explains it. Raised on every worker, before any update."""


@dataclass(frozen=True)
class Narrow:
    """A tensor of the training state that is kept in a narrower form than a checkpoint's: made in parts, put back whole."""

    shape: torch.Size
    """Of at least one dimension."""
    dtype: torch.dtype
    """A checkpoint's: the master's."""
    read: Callable[[int, Tensor], None]
    """(first row, out): fills `out`, [rows, …] of `dtype` on the CPU, contiguous, with the rows from there on."""
    write: Callable[[Tensor], None]
    """Takes the whole tensor, rounded to nearest. What `read` gave comes back to the same bits. `loaded` must follow."""

    def whole(self) -> Tensor:
        """All of it, on the CPU."""
        out = torch.empty(self.shape, dtype=self.dtype)
        self.read(0, out)
        return out


class Strategy(Protocol):
    """Owns the model's memory. One instance a worker; all workers call the same methods in the same order."""

    def step(self, micro_batches: Sequence[MicroBatch], context: StepContext) -> StepResult:
        """One update. `micro_batches` are this worker's; every worker passes the same number (filler included).

        Raises NonFiniteError on all workers if a value is not finite outside fp16 scaling; the weights are then unchanged
        (updates in backward: but for units that backward had come to before the value showed).
        """

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, int]:
        """(loss sum, tokens) over all workers, without touching any training state or random stream."""

    def warm_up(self, micro_batch: MicroBatch) -> None:
        """Forward and backward of one batch of the longest shape, then forget it: compiles, allocates, finds out-of-memory."""

    def flush(self) -> None:
        """Finishes pending updates, so that weights and state are those after the last step."""

    def state_tensors(self) -> dict[str, dict[str, Tensor | Narrow]]:
        """The live training state, {"parameter"|"exp_avg"|"exp_avg_sq": {canonical name: tensor}}.

        Tensors are plain or DTensor, in master precision, or Narrow; a checkpoint is written from them and loaded into them in
        place, and none is copied whole for it. The names are Hugging Face's, the same under every strategy. Calls flush first.
        """

    def state_scalars(self) -> dict[str, Any]:
        """JSON-able state beside the tensors (the loss scale)."""

    def loaded(self, scalars: dict[str, Any]) -> None:
        """Called after tensors were loaded in place: refreshes working copies and takes the scalars back."""

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor on the CPU in master precision), one at a time, in model order; collective on all workers.

        A tied weight comes once, under its first name. Used to export a model folder without holding it whole.
        """

    def peak_memory_bytes(self) -> int:
        """Peak of this worker: reserved card memory on a GPU, resident process memory on a CPU."""
