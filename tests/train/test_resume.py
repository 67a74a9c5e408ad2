"""What a resume makes of every kind of difference."""

from __future__ import annotations

import pytest

from muletrain.checkpoint.progress import Progress, plan_summary
from muletrain.spec.plan import AdapterPlan
from muletrain.spec.recipe import OptimizerSection
from muletrain.train.resume import carry_over
from tests.train.tiny import make_plan


def _saved(plan, **changes) -> Progress:
    values = {
        "update": 13, "window": 13, "tokens": 999, "windows_per_epoch": 10, "rows_per_window": 4, "data_fingerprint": "f",
        "seed": 3, "summary": plan_summary(plan),
    }  # fmt: skip
    return Progress(**(values | changes))


def test_nothing_changed_nothing_said(materials, tmp_path):
    plan = make_plan(materials, tmp_path)
    saved = _saved(plan)
    assert carry_over(saved, plan, 10, "f") == (saved, [])


def test_R08_a_larger_batch_goes_on_at_the_same_row(materials, tmp_path):
    saved = _saved(make_plan(materials, tmp_path))
    position, notes = carry_over(saved, make_plan(materials, tmp_path, micro_batches=8), 5, "f")
    assert (position.window, position.update, position.tokens) == (5 + 1, 13, 999), (
        "epoch 1, row 12 of it: in window 1 of 8 rows"
    )
    assert position.rows_per_window == 8 and position.windows_per_epoch == 5
    assert len(notes) == 1 and "goes on at row 8 of epoch 1, so 4 rows come twice" in notes[0]


def test_R08_a_smaller_batch_loses_and_repeats_nothing(materials, tmp_path):
    saved = _saved(make_plan(materials, tmp_path))
    position, notes = carry_over(saved, make_plan(materials, tmp_path, micro_batches=2), 20, "f")
    assert position.window == 20 + 6
    assert "row 12 of epoch 1, where it stopped" in notes[0]


def test_R08_the_same_rows_in_other_micro_batches_are_the_same_window(materials, tmp_path):
    saved = _saved(make_plan(materials, tmp_path))
    position, notes = carry_over(saved, make_plan(materials, tmp_path, micro_batch=4, micro_batches=1), 10, "f")
    assert position.window == 13 and notes == []


def test_R08_other_data_starts_at_its_beginning(materials, tmp_path):
    plan = make_plan(materials, tmp_path)
    position, notes = carry_over(_saved(plan), plan, 7, "other")
    assert position.window == 0 and position.update == 13
    assert "starts at their beginning; 13 updates count" in notes[0]
    position, notes = carry_over(_saved(plan), make_plan(materials, tmp_path, sequence_length=16), 20, "f")
    assert position.window == 0 and "data.sequence_length changed" in notes[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"alpha": 8.0}, "model.adapter.alpha was 4.0, is now 8.0: the matrices fit"),
        ({"dropout": 0.1}, "model.adapter.dropout was 0.0, is now 0.1: the matrices fit"),
        ({"base": "/other"}, "model.adapter.base was /model, is now /other: the frozen weights may be others"),
    ],
)
def test_an_adapter_goes_on_and_says_what_changed(materials, tmp_path, changes, words):
    adapter = AdapterPlan(kind="lora", rank=2, alpha=4.0, targets=("q_proj",), parameters=8, base="/model")
    saved = _saved(make_plan(materials, tmp_path, adapter=adapter))
    _, notes = carry_over(saved, make_plan(materials, tmp_path, adapter=adapter.model_copy(update=changes)), 10, "f")
    assert len(notes) == 1 and words in notes[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workers": 3}, "parallel.workers was 1, is now 3: the same updates"),
        ({"strategy": "zero3"}, "memory.strategy was resident, is now zero3: the same updates"),
        ({"optimizer": OptimizerSection(learning_rate=1.0)}, "train.optimizer.learning_rate was 0.001, is now 1.0: applies"),
        ({"steps": 60}, "train.steps was 6, is now 60: the schedule"),
        ({"seed": 4}, "train.seed was 3, is now 4: the order of rows changes"),
        ({"compute": "bf16"}, "precision.compute was fp32, is now bf16: applies"),
    ],
)
def test_R08_every_difference_is_said_with_its_rule(materials, tmp_path, changes, words):
    position, notes = carry_over(_saved(make_plan(materials, tmp_path)), make_plan(materials, tmp_path, **changes), 10, "f")
    assert position.window == 13
    assert len(notes) == 1 and words in notes[0]


def test_R08_every_compared_key_has_a_rule(materials, tmp_path):
    plan = make_plan(materials, tmp_path)
    saved = _saved(plan, summary={})
    _, notes = carry_over(saved, plan, 10, "f")
    by_position = 4
    assert len(notes) == len(plan_summary(plan)) - by_position + 1
