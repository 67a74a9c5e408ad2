"""From a Hugging Face config to numbers: parameter counts and dimensions of each known family, without building the model.

Counts are exact (a test builds every catalogue model and compares). A family is a row of FAMILIES; an unknown one is an error
that names the known ones, because a guess here would be wrong in every plan.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from muletrain.catalog.dense import bert_shape, gpt2_shape, rotary_shape
from muletrain.catalog.experts import deepseek_shape, mixtral_shape, qwen3_moe_shape
from muletrain.spec.errors import InputError
from muletrain.spec.model_shape import ModelShape


@dataclass(frozen=True)
class Family:
    """`shape` reads (config, name) into a ModelShape, `layers` names the depth field."""

    shape: Callable[[Mapping[str, Any], str], ModelShape]
    layers: str


FAMILIES = {
    "llama": Family(rotary_shape, "num_hidden_layers"),
    "mistral": Family(rotary_shape, "num_hidden_layers"),
    "qwen2": Family(rotary_shape, "num_hidden_layers"),
    "qwen3": Family(rotary_shape, "num_hidden_layers"),
    "baichuan": Family(rotary_shape, "num_hidden_layers"),
    "gpt2": Family(gpt2_shape, "n_layer"),
    "mixtral": Family(mixtral_shape, "num_hidden_layers"),
    "qwen3_moe": Family(qwen3_moe_shape, "num_hidden_layers"),
    "deepseek_v2": Family(deepseek_shape, "num_hidden_layers"),
    "deepseek_v3": Family(deepseek_shape, "num_hidden_layers"),
    "bert": Family(bert_shape, "num_hidden_layers"),
}


@cache
def known_fields(kind: str) -> frozenset[str]:
    """Field names of a family's config, data/fields.yaml."""
    fields = yaml.safe_load(files("muletrain.catalog").joinpath("data/fields.yaml").read_text(encoding="utf-8"))
    return frozenset(fields["common"]) | frozenset(fields[kind])


def family(config: Mapping[str, Any], name: str) -> Family:
    """The family of a Hugging Face config. Raises InputError for one that is not known."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise InputError(f"model {name}: family {kind!r} is not known in this version; known: {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def model_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """Dimensions and exact parameter counts. Raises InputError where the config is not that of a known, sound decoder."""
    return family(config, name).shape(config, name)


def with_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The config with the recipe's model.overrides. Raises InputError naming each field that is unknown or changes its kind."""
    kind = family(config, name)
    known = known_fields(config["model_type"]) | set(config)
    problems = []
    for field, value in overrides.items():
        old = config.get(field)
        if field == "model_type":
            problems.append("model.overrides.model_type: the family cannot be changed; choose another model.source")
        elif field not in known:
            nearest = difflib.get_close_matches(field, known, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            problems.append(f"model.overrides.{field}: a {config['model_type']} config has no such field{hint}")
        elif old is not None and value is not None and not _same_kind(old, value):
            problems.append(f"model.overrides.{field}: {value!r} cannot replace {old!r}; write {type(old).__name__} there")
    if problems:
        raise InputError(*problems)
    changed = {**config, **overrides}
    if kind.layers in overrides and "layer_types" in config and "layer_types" not in overrides:
        changed["layer_types"] = config["layer_types"][: changed[kind.layers]]
        if len(changed["layer_types"]) < changed[kind.layers]:
            raise InputError(
                f"model.overrides.{kind.layers}: more layers than {name} has; give model.overrides.layer_types too"
            )
    return changed


def _same_kind(old: Any, new: Any) -> bool:
    if isinstance(old, bool) or isinstance(new, bool):
        return isinstance(old, bool) and isinstance(new, bool)
    if isinstance(old, float):
        return isinstance(new, int | float)
    if isinstance(old, int) and isinstance(new, list):  # eos_token_id: one or several
        return all(isinstance(item, int) for item in new)
    return isinstance(new, type(old)) or (isinstance(old, list) and isinstance(new, int))
