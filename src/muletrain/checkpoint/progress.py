"""Progress: how far a run is, as plain JSON. Tensors are DCP's; everything else a resume needs is here, and no pickle is read.

There is no random state in it: order, dropout and rounding are keyed by seed and position, so the position is the state.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from muletrain.spec.plan import Plan
from muletrain.spec.value import Value


class Progress(Value):
    """Position and counters after a step, over all sessions of the run."""

    schema_version: int = 1
    update: int = 0
    """Applied optimizer updates."""
    window: int = 0
    """Windows (global batches) consumed, over all epochs."""
    tokens: int = 0
    """Trained tokens of applied updates."""
    skipped: int = 0
    """Steps that made no update."""
    windows_per_epoch: int
    rows_per_window: int
    data_fingerprint: str
    seed: int
    scalars: dict[str, Any] = Field(default_factory=dict)
    """The strategy's own (loss scale)."""
    summary: dict[str, Any] = Field(default_factory=dict)
    """What the plan said, by dotted recipe key: compared on resume."""

    @property
    def epoch(self) -> int:
        """Passes over the data that are complete."""
        return self.window // self.windows_per_epoch


def plan_summary(plan: Plan) -> dict[str, Any]:
    """The decisions that can make a resumed run differ, by dotted key."""
    keys: dict[str, Any] = {
        "model.config": dict(sorted(plan.model.config.items())),
        "data.sequence_length": plan.data.sequence_length,
        "data.packing": plan.data.packing,
        "train.steps": plan.train.steps,
        "train.epochs": plan.train.epochs,
        "train.micro_batch": plan.train.micro_batch,
        "train.micro_batches": plan.train.micro_batches,
        "train.clip_norm": plan.train.clip_norm,
        "train.seed": plan.train.seed,
        "precision.compute": plan.precision.compute,
        "memory.strategy": plan.memory.strategy,
        "parallel.workers": plan.parallel.workers,
        "parallel.device": plan.parallel.device,
    }
    adapter = plan.model.adapter
    if adapter.trains:
        for key in ("kind", "rank", "alpha", "dropout", "targets", "rslora", "base"):
            keys[f"model.adapter.{key}"] = adapter.model_dump(mode="json")[key]
    for section in ("optimizer", "schedule"):
        for key, value in getattr(plan.train, section).model_dump(mode="json").items():
            keys[f"train.{section}.{key}"] = value
    return keys
