"""Number formats of a run: what is computed in, and what the master copy is kept in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from muletrain.spec.recipe import ComputeDtype

_TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class Precision:
    """compute: parameters and activations in the model; master: weights, gradient sums and optimizer state."""

    compute: torch.dtype
    master: torch.dtype

    @property
    def split(self) -> bool:
        """The model computes with a rounded copy of the master weights."""
        return self.compute != self.master


def precision_of(compute: ComputeDtype) -> Precision:
    """fp32 masters for everything but fp64, which is its own master."""
    return Precision(_TORCH[compute], torch.float64 if compute == "fp64" else torch.float32)


def torch_dtype(name: str) -> torch.dtype:
    """fp32 -> torch.float32 and so on."""
    return _TORCH[name]
