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

from muletrain.spec.errors import InputError
from muletrain.spec.model_shape import ModelShape


@dataclass(frozen=True)
class Family:
    """`shape` reads (config, name) into a ModelShape, `layers` names the depth field."""

    shape: Callable[[Mapping[str, Any], str], ModelShape]
    layers: str


def _whole(config: Mapping[str, Any], name: str, field: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if value is None:
        raise InputError(f"model {name}: its config has no {field}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"model {name}: {field} is {value!r} in its config; it must be a whole number of at least 1")
    return value


def _positions(config: Mapping[str, Any], name: str) -> int:
    """Positions the model is made for, with rope scaling where the config asks for one."""
    plain = _whole(config, name, "max_position_embeddings", 2048)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("default", "llama3"):  # llama3: max_position_embeddings is the scaled length already
        return plain
    return max(plain, int(float(rope.get("factor") or 1.0) * int(rope.get("original_max_position_embeddings") or plain)))


def _rotary_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """llama and qwen3: RMS norms, rotary positions, gated feed-forward, grouped heads."""
    qwen = config["model_type"] == "qwen3"
    hidden, ffn = _whole(config, name, "hidden_size"), _whole(config, name, "intermediate_size")
    layers, vocab = _whole(config, name, "num_hidden_layers"), _whole(config, name, "vocab_size")
    heads = _whole(config, name, "num_attention_heads")
    kv_heads = _whole(config, name, "num_key_value_heads", 32 if qwen else heads)
    if heads % kv_heads:
        raise InputError(f"model {name}: num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
    if not config.get("head_dim") and not qwen and hidden % heads:
        raise InputError(f"model {name}: hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads})")
    head_dim = _whole(config, name, "head_dim", 128 if qwen else hidden // heads)
    width, kv_width = heads * head_dim, kv_heads * head_dim
    matrices = hidden * (2 * width + 2 * kv_width) + 3 * hidden * ffn
    vectors = 2 * hidden + (2 * head_dim if qwen else 0)
    if config.get("attention_bias"):
        vectors += width + 2 * kv_width + hidden
    if config.get("mlp_bias"):
        vectors += 2 * ffn + hidden
    tied = bool(config.get("tie_word_embeddings", False))
    block = matrices + vectors
    return ModelShape(
        name=name,
        family=config["model_type"],
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        tied=tied,
        max_positions=_positions(config, name),
        parameters=vocab * hidden * (1 if tied else 2) + layers * block + hidden,
        block_parameters=block,
        matmul_parameters=layers * matrices + vocab * hidden,
    )


def _gpt2_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """gpt2: layer norms with bias, learned positions, plain feed-forward, biases everywhere."""
    hidden = _whole(config, name, "n_embd", 768)
    layers, heads = _whole(config, name, "n_layer", 12), _whole(config, name, "n_head", 12)
    vocab, positions = _whole(config, name, "vocab_size", 50257), _whole(config, name, "n_positions", 1024)
    ffn = _whole(config, name, "n_inner", 4 * hidden)
    if hidden % heads:
        raise InputError(f"model {name}: n_embd ({hidden}) must be a multiple of n_head ({heads})")
    if config.get("add_cross_attention"):
        raise InputError(f"model {name}: add_cross_attention is not a decoder-only model; set it to false")
    matrices = 4 * hidden * hidden + 2 * hidden * ffn
    block = matrices + 3 * hidden + hidden + ffn + hidden + 4 * hidden
    tied = bool(config.get("tie_word_embeddings", True))
    return ModelShape(
        name=name,
        family="gpt2",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=vocab,
        tied=tied,
        max_positions=positions,
        parameters=vocab * hidden * (1 if tied else 2) + positions * hidden + layers * block + 2 * hidden,
        block_parameters=block,
        matmul_parameters=layers * matrices + vocab * hidden,
    )


FAMILIES = {
    "llama": Family(_rotary_shape, "num_hidden_layers"),
    "qwen3": Family(_rotary_shape, "num_hidden_layers"),
    "gpt2": Family(_gpt2_shape, "n_layer"),
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
