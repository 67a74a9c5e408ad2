"""Packing is bookkeeping: with the same documents in each step, packed and unpacked runs give the same losses and norms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from muletrain.data.prepare import prepare
from muletrain.data.stream import TrainingStream
from muletrain.optim.schedule import learning_rate
from muletrain.spec.plan import DataPlan, ModelPlan
from muletrain.strategy.contract import StepContext
from tests.strategy.runs import Run, curve, plan_of, start, worst

SENTENCES = ["a mule walks", "the train of mules walks in a line, slowly", "load", "carry the heavy load up the long road " * 4]


def data_plan(folder: Path, tokenizer: str, packing: str) -> DataPlan:
    """Ten documents of 6 to 160 bytes."""
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for number in range(10):
        (corpus / f"{number:02}.txt").write_text(f"{number} " + SENTENCES[number % 4], encoding="utf-8")
    return DataPlan(
        source=(str(corpus),),
        tokenizer=tokenizer,
        text_key="text",
        sequence_length=64,
        packing=packing,
        validation_fraction=0.0,
        bad_rows="stop",
        cache_dir=str(folder / "cache"),
        processes=1,
    )


def whole_epochs(folder: Path, run: Run, packing: str, micro_batch: int) -> list[tuple[float, float]]:
    """Twenty steps, each over every document."""
    prepared = prepare(data_plan(folder, run.model.source, packing))
    stream = TrainingStream(
        prepared, sequence_length=64, packing=packing, micro_batch=micro_batch, micro_batches=1000, seed=run.seed
    )
    assert stream.windows_per_epoch == 1
    strategy = start(run)
    schedule = plan_of(run).train.schedule
    results = []
    for step in range(20):
        rate = learning_rate(schedule, run.rate, run.steps, step)
        results.append(strategy.step(stream.window(step, 0, 1), StepContext(step, step, rate)))
    assert len({r.tokens for r in results}) == 1
    return curve(results)


@pytest.mark.parametrize(("family", "compute", "rate", "bound"), [("gpt2", "fp64", 3e-3, 1e-6), ("llama", "fp32", 1e-3, 1e-5)])
def test_P01_P02_P05_packed_equals_unpacked(
    models: dict[str, ModelPlan], tmp_path: Path, family: str, compute: str, rate: float, bound: float
) -> None:
    """Three packings, other micro-batches, one answer; the documents cannot see each other or the padding."""
    model = models[family]
    if family == "gpt2":  # dropout is keyed by micro-batch, which packing changes
        quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = model.model_copy(update={"config": {**model.config, **quiet}})
    run = Run(model, compute=compute, rate=rate)
    unpacked = whole_epochs(tmp_path, run, "none", 1)
    assert worst(whole_epochs(tmp_path, run, "best_fit", 2), unpacked) < bound
    assert worst(whole_epochs(tmp_path, replace(run, strategy="streamed"), "best_fit", 1), unpacked) < bound
    assert worst(whole_epochs(tmp_path, run, "none", 5), unpacked) < bound
