"""The meter: speed and remaining time of this session, from what this session did.

Tokens are trained tokens over all workers: no padding, no evaluation, no dry batch or compilation, nothing of earlier sessions.
"""

from __future__ import annotations

import statistics
from collections import deque

from muletrain.spec.model_shape import ModelShape

_RECENT = 20
"""Steps that the shown speed and the remaining time go by."""


class Meter:
    """Adds up one session."""

    def __init__(self) -> None:
        self.tokens = 0
        self.step_seconds = 0.0
        self.other_seconds = 0.0
        self.steps = 0
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RECENT)

    def step(self, tokens: int, seconds: float) -> None:
        """One step: trained tokens (0 if it was skipped) and its wall time."""
        self.tokens += tokens
        self.step_seconds += seconds
        self.steps += 1
        self._recent.append((tokens, seconds))

    def other(self, seconds: float) -> None:
        """Time in which the run trained nothing: an evaluation, a checkpoint."""
        self.other_seconds += seconds

    @property
    def tokens_per_s(self) -> float:
        """Over the session's steps; 0 before the first."""
        return self.tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def recent_tokens_per_s(self) -> float:
        """Over the last steps; 0 before the first."""
        seconds = sum(s for _, s in self._recent)
        return sum(t for t, _ in self._recent) / seconds if seconds else 0.0

    def remaining_s(self, steps: int) -> float | None:
        """Time for `steps` more at the recent pace, with evaluations and checkpoints as often as so far. None: too early."""
        if len(self._recent) < 2:
            return None
        pace = statistics.median(s for _, s in self._recent)
        return steps * (pace + self.other_seconds / self.steps)


def model_flops_utilisation(
    shape: ModelShape, sequence_length: int, tokens_per_s: float, workers: int, peak_flops: float, adapter: int = 0
) -> float | None:
    """Model FLOPs of the trained tokens over the devices' dense peak. None if no peak is known, or if the result is above 1,
    which only a wrong peak or clock can give. `adapter`: its parameters, if only those are trained."""
    if peak_flops <= 0:
        return None
    share = shape.flops_a_token(sequence_length, adapter) * tokens_per_s / (workers * peak_flops)
    return share if share <= 1 else None


def hardware_over_model_flops(shape: ModelShape, sequence_length: int, recompute: bool, adapter: int = 0) -> float:
    """FLOPs that are computed over those that the model needs: recompute runs the forward of blocks twice, not the head's."""
    if not recompute:
        return 1.0
    head = 6.0 * shape.vocab * shape.hidden
    again = (shape.flops_a_token(sequence_length) - head) / 3.0 + 2.0 * adapter
    return 1.0 + again / shape.flops_a_token(sequence_length, adapter)
