"""Bytes of a parameter's training state by its number formats, as plain numbers: planned without torch, moved by the engine.

The torch wing computes the same from the tensors it makes (optim.flat.state_bytes); a test holds the two equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from muletrain.spec.recipe import ComputeDtype, OptimizerState

_WORKING: Final[dict[ComputeDtype, int]] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
_SCALE: Final = 4 / 256
"""8-bit numbers share an fp32 scale a block of 256."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes a parameter."""

    working: int
    """The copy that the model computes with."""
    master: int
    """fp32, or fp64 with fp64 compute. Of a 16-bit run it is two halves, and with bf16 one half is the working copy."""
    moments: float
    """Both of AdamW's, scales included."""
    gradient: int
    """Summed over micro-batches, as it waits in host memory."""
    own_working: bool
    """The working copy is kept beside the state: fp16 is no half of an fp32 number."""

    @property
    def up(self) -> float:
        """To the card for an update: master, moments and gradient."""
        return self.master + self.moments + self.gradient

    @property
    def down(self) -> float:
        """Back after it: master, moments, and the working copy where the master does not hold it."""
        return self.master + self.moments + (self.working if self.own_working else 0)

    @property
    def beside_working(self) -> float:
        """What is kept beyond the working copy and the gradient."""
        return self.down - self.working


def state_bytes_of(compute: ComputeDtype, moments: OptimizerState, gradients: Literal["master", "bf16"]) -> StateBytes:
    """Of `precision.compute`, `train.optimizer.state` and StreamingPlan.gradients."""
    master = 8 if compute == "fp64" else 4
    each = {"fp32": float(master), "bf16": 2.0, "8bit": 1 + _SCALE}[moments]
    gradient = master if gradients == "master" else 2
    return StateBytes(_WORKING[compute], master, 2 * each, gradient, own_working=compute == "fp16")
