"""Rules between keys, each broken on purpose; and that sound neighbours pass."""

from __future__ import annotations

from typing import Any

import pytest

from muletrain.config.rules import RULES, broken_rules, whole_micro_batches
from muletrain.spec.recipe import RunConfig


def config(train: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    base = {"run_dir": "r", "model": {"source": "m"}, "data": {"source": "d"} | sections.pop("data", {})}
    return RunConfig.model_validate(base | {"train": {"steps": 100} | (train or {})} | sections)


BROKEN = [
    (config({"steps": None}), "train.steps", "give one of them"),
    (config({"schedule": {"warmup_steps": 101}}), "train.schedule.warmup_steps", "101 is more than train.steps (100)"),
    (config({"schedule": {"kind": "wsd", "warmup_steps": 90}}), "train.schedule.decay_fraction", "at most 0.1 fits"),
    (config({"schedule": {"decay_fraction": 0.5}}), "train.schedule.decay_fraction", "only kind: wsd uses it"),
    (config({"schedule": {"kind": "constant", "final_ratio": 0.5}}), "train.schedule.final_ratio", "never lowers the rate"),
    (config(precision={"initial_loss_scale": 2}), "precision.initial_loss_scale", "compute is bf16"),
    (config({"tokens_per_step": 3000}), "train.tokens_per_step", "2048 or 4096 would work"),
    (config({"tokens_per_step": 1000}), "train.tokens_per_step", "not a whole number; 2048 would work"),
    (config({"evaluate_every": 5}, data={"validation_fraction": 0}), "train.evaluate_every", "nothing to evaluate on"),
    (
        config(memory={"strategy": "zero3", "activations": "offload"}),
        "memory.activations",
        "only memory.strategy: streamed can",
    ),
    (
        config({"optimizer": {"state": "8bit"}}, memory={"strategy": "zero3"}),
        "train.optimizer.state",
        "use streamed, or remove",
    ),
    (
        config(precision={"gradients": "bf16"}, memory={"strategy": "resident"}),
        "precision.gradients",
        "use streamed, or remove",
    ),
    (config(memory={"strategy": "zero1", "waves": 2}), "memory.waves", "use streamed, or remove"),
    (config(memory={"strategy": "resident", "placement": 2}), "memory.placement", "use streamed, or remove"),
    (
        config({"optimizer": {"state": "bf16"}}, precision={"compute": "fp64"}, memory={"strategy": "streamed"}),
        "train.optimizer.state",
        "keeps moments in fp64",
    ),
    (
        config(precision={"compute": "fp64", "gradients": "fp32"}, memory={"strategy": "streamed"}),
        "precision.gradients",
        "keeps gradients in fp64",
    ),
    *(
        (config(model={"source": "m", "adapter": {name: value}}), f"model.adapter.{name}", "set model.adapter.kind: lora")
        for name, value in {"rank": 8, "alpha": 4, "dropout": 0.1, "targets": ["q_proj"], "rslora": True}.items()
    ),
    (
        config(model={"source": "m", "adapter": {"kind": "lora", "targets": ["auto", "q_proj"]}}),
        "model.adapter.targets",
        "give auto alone, or names alone",
    ),
    (
        config(model={"source": "m", "adapter": {"kind": "lora"}}, precision={"gradients": "fp32"}),
        "precision.gradients",
        "stay in the masters' format",
    ),
    (config(memory={"strategy": "streamed", "waves": 33}), "memory.waves", "a step has 32 micro-batch(es)"),
]


@pytest.mark.parametrize(("request_", "key", "message"), BROKEN)
def test_O03_broken_rule_names_key_and_fix(request_: RunConfig, key: str, message: str) -> None:
    ((blamed, said),) = broken_rules(request_)
    assert blamed == key and message in said
    assert said.startswith(key)


def test_every_rule_is_broken_above() -> None:
    assert all(any(rule.check(request_) for request_, _, _ in BROKEN) for rule in RULES)


@pytest.mark.parametrize(
    "sound",
    [
        config(),
        config({"steps": None, "epochs": 1}),
        config({"schedule": {"warmup_steps": 100}}),
        config({"schedule": {"kind": "wsd", "warmup_steps": 80}}),
        config({"evaluate_every": 0}, data={"validation_fraction": 0}),
        config(memory={"strategy": "streamed", "activations": "recompute"}, parallel={"workers": 1, "device": "cpu"}),
        config(memory={"strategy": "streamed", "waves": 32}, parallel={"workers": 1, "device": "cuda"}),
        config({"optimizer": {"state": "8bit"}}, precision={"gradients": "bf16"}, memory={"waves": 1}),
        config({"optimizer": {"state": "bf16"}}, precision={"gradients": "fp32"}, memory={"strategy": "streamed"}),
        config(precision={"compute": "fp16", "initial_loss_scale": 2}),
        config({"schedule": {"kind": "constant"}}),
    ],
)
def test_sound_requests_pass(sound: RunConfig) -> None:
    assert list(broken_rules(sound)) == []


def test_rules_of_unsound_keys_are_not_asked() -> None:
    assert list(broken_rules(config({"steps": None}), {"train.epochs"})) == []


@pytest.mark.parametrize(
    ("tokens", "micro_batch", "length", "count"),
    [
        (65_536, 1, 2048, 32),
        (64_000, 1, 2048, 31),
        (3072, 4, 256, 3),
        (1950, 1, 2048, None),
        (1951, 1, 2048, 1),
        (2150, 1, 2048, 1),
        (2156, 1, 2048, None),
        (1, 1, 2048, None),
        (10**12, 1, 2048, 488_281_250),
    ],
)
def test_micro_batches_are_rounded_within_five_per_cent(tokens: int, micro_batch: int, length: int, count: int | None) -> None:
    request = config({"tokens_per_step": tokens, "micro_batch": micro_batch}, data={"sequence_length": length})
    assert whole_micro_batches(request) == count
