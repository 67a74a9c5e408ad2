"""A whole small run: text rows with their number in them, a tiny LLaMA, and a plan whose every field a test may change."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muletrain.data.prepare import prepare
from muletrain.launch import local
from muletrain.metrics.events import read_events
from muletrain.spec.events import RunRecord
from muletrain.spec.plan import DataPlan, ModelPlan, Plan
from muletrain.train.build import Session
from muletrain.train.worker import run_worker
from tests import plans
from tests.families.tiny import model_plan, tiny_llama


@dataclass(frozen=True)
class Materials:
    """What all runs of a module share."""

    model: ModelPlan
    data: DataPlan
    prepared: Path


def make_materials(folder: Path, rows: int = 40, **model: Any) -> Materials:
    """Data on disk, and a model folder."""
    text = folder / "text.jsonl"
    lines = [json.dumps({"text": f"row {row} " + "the mules walk on " * (row % 5)}) for row in range(rows)]
    text.write_text("\n".join(lines) + "\n")
    source = tiny_llama(folder / "model", **({"hidden_size": 32, "intermediate_size": 48} | model))
    data = DataPlan(
        source=(str(text),),
        tokenizer=str(source),
        text_key="text",
        sequence_length=32,
        packing="concat",
        validation_fraction=0.1,
        bad_rows="skip",
        cache_dir=str(folder / "cache"),
        processes=1,
    )
    return Materials(model_plan(source), data, prepare(data).folder)


def make_plan(materials: Materials, run_dir: Path, **changes: Any) -> Plan:
    """A plan of 6 steps of 4 micro-batches; `changes` are fields of any section."""
    plan = plans.make_plan(materials.model, run_dir=str(run_dir)).model_copy(update={"data": materials.data})
    return plans.changed(plan, **changes)


def run(materials: Materials, plan: Plan, **session: Any) -> int:
    """Trains in forked workers, as `mule train` does; the exit code."""
    made = Session(materials.prepared, **session)
    return local.run(lambda place: run_worker(plan, place, made), plan.parallel.workers, Path(plan.run_dir))


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The step events of all sessions."""
    return [event for event in events_of(run_dir) if event["kind"] == "step"]


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    """All events of all sessions."""
    return read_events(run_dir / "events.jsonl")


def record_of(run_dir: Path) -> RunRecord:
    """The last session's summary."""
    return RunRecord.load(run_dir / "record.json")
