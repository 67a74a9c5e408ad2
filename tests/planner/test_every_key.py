"""No dead key: changing any leaf of RunConfig changes the Plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from muletrain.catalog.models import model_config
from muletrain.config.keys import dotted, table
from muletrain.planner.resolve import resolve

from .boxes import GIB, H200, box, request

CHANGES: dict[str, Any] = {
    "run_dir": "elsewhere",
    "model.source": "gpt2",
    "model.weights": "random",
    "model.overrides": {"num_hidden_layers": 3},
    "model.adapter.kind": "lora",
    "model.adapter.rank": 8,
    "model.adapter.alpha": 5.0,
    "model.adapter.dropout": 0.1,
    "model.adapter.targets": ["q_proj"],
    "model.adapter.rslora": True,
    "data.source": ["other"],
    "data.tokenizer": "other",
    "data.text_key": "content",
    "data.sequence_length": 1024,
    "data.packing": "none",
    "data.validation_fraction": 0.2,
    "data.bad_rows": "stop",
    "data.cache_dir": "elsewhere",
    "data.processes": 3,
    "train.steps": 7,
    "train.epochs": 2,
    "train.tokens_per_step": 8192,
    "train.micro_batch": 2,
    "train.clip_norm": 0.5,
    "train.seed": 9,
    "train.evaluate_every": 10,
    "train.evaluate_sequences": 9,
    "train.compile": False,
    "train.optimizer.learning_rate": 1e-5,
    "train.optimizer.beta1": 0.8,
    "train.optimizer.beta2": 0.99,
    "train.optimizer.epsilon": 1e-6,
    "train.optimizer.weight_decay": 0.0,
    "train.optimizer.state": "8bit",
    "train.schedule.kind": "wsd",
    "train.schedule.warmup_steps": 3,
    "train.schedule.final_ratio": 0.0,
    "train.schedule.decay_fraction": 0.5,
    "precision.compute": "bf16",
    "precision.initial_loss_scale": 1024.0,
    "precision.gradients": "bf16",
    "memory.strategy": "zero3",
    "memory.activations": "recompute",
    "memory.gpu_limit": 40 * GIB,
    "memory.host_limit": 40 * GIB,
    "memory.loss_chunk": 64,
    "memory.waves": 2,
    "memory.placement": 1,
    "parallel.workers": 1,
    "parallel.device": "cpu",
    "parallel.hang_after_s": 60,
    "checkpoint.every": 5,
    "checkpoint.keep": 5,
    "checkpoint.resume": "never",
    "checkpoint.model_dtype": "bf16",
    "log.every": 5,
    "log.console": "quiet",
}
NEEDS: dict[str, dict[str, Any]] = {
    **{f"model.adapter.{name}": {"model.adapter.kind": "lora"} for name in ("rank", "alpha", "dropout", "targets", "rslora")},
    "precision.initial_loss_scale": {"precision.compute": "fp16"},
    "train.schedule.decay_fraction": {"train.schedule.kind": "wsd"},
    "train.optimizer.state": {"memory.strategy": "streamed"},
    "precision.gradients": {"memory.strategy": "streamed"},
    "memory.waves": {"memory.strategy": "streamed"},
    "memory.placement": {"memory.strategy": "streamed"},
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with weights, so that model.weights has something to decide."""
    (tmp_path / "config.json").write_text(json.dumps(model_config("smollm2-135m")), encoding="utf-8")
    (tmp_path / "model.safetensors").touch()
    return str(tmp_path)


def test_the_list_is_complete() -> None:
    assert sorted(CHANGES) == sorted(dotted(path) for path in table()[1])


@pytest.mark.parametrize("key", CHANGES)
def test_every_key_changes_the_plan(key: str, model: str) -> None:
    base = {"model.source": model, **NEEDS.get(key, {})}
    before, after = (resolve(request(changes), box(H200, H200)) for changes in (base, base | {key: CHANGES[key]}))
    assert before.model_dump(exclude={"reasons"}) != after.model_dump(exclude={"reasons"})
