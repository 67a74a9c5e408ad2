"""Plans for tests: all sections stand here once, so a new field of Plan is set in one place. Changes go by field name."""

from __future__ import annotations

from typing import Any

from muletrain.spec.ledger import Ledger
from muletrain.spec.plan import (
    CheckpointPlan,
    DataPlan,
    LogPlan,
    MemoryPlan,
    ModelPlan,
    ParallelPlan,
    Plan,
    PrecisionPlan,
    TrainPlan,
)
from muletrain.spec.recipe import OptimizerSection, ScheduleSection

SECTIONS = ("train", "precision", "memory", "parallel", "checkpoint", "log", "data", "model")
"""A field that several have ("every") is the first one's."""


def make_plan(model: ModelPlan, **changes: Any) -> Plan:
    """A resident fp32 plan for one CPU worker, with other fields."""
    plan = Plan(
        run_dir="",
        model=model,
        data=DataPlan(
            source=(),
            tokenizer="",
            text_key="text",
            sequence_length=32,
            packing="concat",
            validation_fraction=0.1,
            bad_rows="skip",
            cache_dir="",
            processes=1,
        ),
        train=TrainPlan(
            steps=6,
            epochs=0,
            micro_batch=1,
            micro_batches=4,
            clip_norm=1.0,
            seed=3,
            evaluate_every=0,
            evaluate_sequences=4,
            compile=False,
            optimizer=OptimizerSection(learning_rate=1e-3),
            schedule=ScheduleSection(kind="cosine", warmup_steps=2),
        ),
        precision=PrecisionPlan(compute="fp32", initial_loss_scale=1.0),
        memory=MemoryPlan(strategy="resident", activations="keep", loss_chunk=64, gpu_limit=0, ledger=Ledger(items=())),
        parallel=ParallelPlan(workers=1, device="cpu"),
        checkpoint=CheckpointPlan(every=0, keep=2, resume="auto", model_dtype="fp32"),
        log=LogPlan(every=1, console="quiet"),
        reasons=(),
    )
    return changed(plan, **changes)


def changed(plan: Plan, **changes: Any) -> Plan:
    """The plan with other fields, of itself or of its sections."""
    own = {key: changes.pop(key) for key in ("run_dir", "reasons") if key in changes}
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section = next(name for name in SECTIONS if key in type(getattr(plan, name)).model_fields)
        sections.setdefault(section, {})[key] = value
    updated = {name: getattr(plan, name).model_copy(update=fields) for name, fields in sections.items()}
    return plan.model_copy(update=own | updated)
