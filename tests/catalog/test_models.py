"""Catalogue shapes are those Transformers builds, parameter for parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from muletrain.catalog.families import FAMILIES, known_fields, model_shape, with_overrides
from muletrain.catalog.models import model_config, model_names, model_tokenizer
from muletrain.spec.errors import InputError

SMALL_LLAMA = {
    "model_type": "llama", "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 509, "max_position_embeddings": 256,
}  # fmt: skip
VARIANTS = [
    SMALL_LLAMA,
    SMALL_LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True},
    SMALL_LLAMA | {"num_key_value_heads": None},
    SMALL_LLAMA | {"model_type": "qwen3", "head_dim": 32},
    SMALL_LLAMA | {"model_type": "qwen3", "num_attention_heads": 32, "num_key_value_heads": None, "attention_bias": True},
    {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 3, "n_inner": 100, "n_positions": 64, "vocab_size": 300},
    {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 3, "vocab_size": 300, "tie_word_embeddings": False},
]


def build_on_meta(config: dict[str, Any]) -> PreTrainedModel:
    fields = {name: value for name, value in config.items() if name != "model_type"}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields))


@pytest.mark.parametrize("config", [*(model_config(name) for name in model_names()), *VARIANTS], ids=str)
def test_counts_are_those_of_the_built_model(config: dict[str, Any]) -> None:
    model, shape = build_on_meta(config), model_shape(config, "x")
    blocks = getattr(model.base_model, "layers", None) or model.base_model.h
    head = model.get_output_embeddings()
    matrices = sum(p.numel() for p in blocks.parameters() if p.dim() == 2) + head.weight.numel()
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.block_parameters == sum(p.numel() for p in blocks[0].parameters())
    assert shape.matmul_parameters == matrices
    assert shape.layers == len(blocks) == model.config.num_hidden_layers
    assert (shape.heads, shape.hidden, shape.vocab) == (
        model.config.num_attention_heads, model.config.hidden_size, head.weight.shape[0])  # fmt: skip
    assert shape.tied == (head.weight is model.get_input_embeddings().weight)
    assert shape.max_positions == model.config.max_position_embeddings


def test_published_sizes() -> None:
    sizes = {name: model_shape(model_config(name), name).parameters for name in model_names()}
    assert sizes["deepseek-llm-7b"] == 6_910_365_696
    assert sizes["llama-3-8b"] == 8_030_261_248
    assert sizes["llama-2-13b"] == 13_015_864_320
    assert sizes["gpt2"] == 124_439_808
    assert sizes["smollm2-135m"] == 134_515_008
    assert 5e6 < sizes["deepseek-llm-tiny"] < 10e6
    assert sizes["deepseek-llm-67b"] == pytest.approx(67.4e9, rel=1e-3)


def test_flops_a_token_of_deepseek_7b() -> None:
    assert model_shape(model_config("deepseek-llm-7b"), "x").flops_a_token(4096) == pytest.approx(41.96e9, rel=2e-3)


@pytest.mark.parametrize("kind", FAMILIES)
def test_known_fields_are_those_of_transformers(kind: str) -> None:
    assert set(CONFIG_MAPPING[kind]().to_dict()) <= known_fields(kind)


def test_unknown_name_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"'deepseek-7b' is not in the model catalogue; did you mean deepseek-llm-7b"):
        model_config("deepseek-7b")
    with pytest.raises(InputError, match="it has deepseek-llm-7b, "):
        model_config("zzz")


def test_unknown_family_names_the_known() -> None:
    with pytest.raises(InputError, match="family 'mamba' is not known in this version; known: llama, qwen3, gpt2"):
        model_shape({"model_type": "mamba"}, "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "model x: its config has no hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0 in its config; it must be a whole number of at least 1"),
        ({"vocab_size": "4096"}, "vocab_size is '4096'"),
        ({"num_key_value_heads": 4}, r"num_attention_heads \(6\) must be a multiple of num_key_value_heads \(4\)"),
        (
            {"num_attention_heads": 7, "num_key_value_heads": 7},
            r"hidden_size \(96\) must be a multiple of num_attention_heads \(7\)",
        ),
    ],
)
def test_unsound_config_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model_shape(SMALL_LLAMA | change, "x")


def test_unsound_gpt2_is_refused() -> None:
    with pytest.raises(InputError, match=r"n_embd \(50\) must be a multiple of n_head \(3\)"):
        model_shape({"model_type": "gpt2", "n_embd": 50, "n_head": 3}, "x")
    with pytest.raises(InputError, match="add_cross_attention"):
        model_shape({"model_type": "gpt2", "add_cross_attention": True}, "x")


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({}, 256),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 256),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 1024),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 200}}, 400),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}}, 256),
    ],
)
def test_positions_follow_rope_scaling(rope: dict[str, Any], positions: int) -> None:
    assert model_shape(SMALL_LLAMA | rope, "x").max_positions == positions


def test_overrides_change_the_config() -> None:
    config = with_overrides(
        SMALL_LLAMA | {"eos_token_id": 2}, {"num_hidden_layers": 1, "eos_token_id": [1, 2], "head_dim": 8}, "x"
    )
    assert (config["num_hidden_layers"], config["eos_token_id"], config["head_dim"]) == (1, [1, 2], 8)
    assert SMALL_LLAMA["num_hidden_layers"] == 3


def test_wrong_overrides_are_all_named() -> None:
    with pytest.raises(InputError) as caught:
        with_overrides(
            SMALL_LLAMA, {"num_hiden_layers": 1, "vocab_size": "64k", "hidden_size": True, "model_type": "gpt2"}, "x"
        )
    first, second, third, fourth = caught.value.problems
    assert "model.overrides.num_hiden_layers: a llama config has no such field; did you mean num_hidden_layers?" in first
    assert "model.overrides.vocab_size: '64k' cannot replace 509; write int there" in second
    assert "model.overrides.hidden_size: True cannot replace 96" in third
    assert "model.overrides.model_type: the family cannot be changed" in fourth


def test_fewer_layers_shorten_layer_types() -> None:
    qwen = SMALL_LLAMA | {"model_type": "qwen3", "layer_types": ["full_attention"] * 3}
    assert with_overrides(qwen, {"num_hidden_layers": 2}, "x")["layer_types"] == ["full_attention"] * 2
    with pytest.raises(InputError, match=r"give model\.overrides\.layer_types too"):
        with_overrides(qwen, {"num_hidden_layers": 5}, "x")


def test_catalogue_configs_are_copies_and_tokenizers_are_named() -> None:
    model_config("gpt2")["n_layer"] = 1
    assert model_config("gpt2")["n_layer"] == 12
    assert model_tokenizer("deepseek-llm-7b") == "deepseek-ai/deepseek-llm-7b-base"
    assert model_tokenizer("deepseek-llm-tiny") is None
