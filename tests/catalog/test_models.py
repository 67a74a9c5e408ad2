"""Catalogue shapes are those Transformers builds, parameter for parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from muletrain.catalog.families import FAMILIES, known_fields, model_shape, with_overrides
from muletrain.catalog.models import catalogue_name, model_config, model_names, model_source, model_tokenizer
from muletrain.spec.errors import InputError

SMALL_LLAMA = {
    "model_type": "llama", "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 509, "max_position_embeddings": 256,
}  # fmt: skip
QWEN_EXPERTS = {
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
LATENT = {
    "model_type": "deepseek_v2", "num_key_value_heads": 6, "n_routed_experts": 8, "n_shared_experts": 2,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "q_lora_rank": None,
    "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
}  # fmt: skip
VARIANTS = [
    SMALL_LLAMA,
    SMALL_LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True},
    SMALL_LLAMA | {"num_key_value_heads": None},
    SMALL_LLAMA | {"model_type": "qwen3", "head_dim": 32},
    SMALL_LLAMA | {"model_type": "qwen3", "num_attention_heads": 32, "num_key_value_heads": None, "attention_bias": True},
    {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 3, "n_inner": 100, "n_positions": 64, "vocab_size": 300},
    {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 3, "vocab_size": 300, "tie_word_embeddings": False},
    SMALL_LLAMA | {"model_type": "mistral", "head_dim": 24},
    SMALL_LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True},
    SMALL_LLAMA | {"model_type": "mixtral", "num_local_experts": 4},
    SMALL_LLAMA | QWEN_EXPERTS,
    SMALL_LLAMA | QWEN_EXPERTS | {"mlp_only_layers": [1], "attention_bias": True},
    SMALL_LLAMA | QWEN_EXPERTS | {"decoder_sparse_step": 2},
    SMALL_LLAMA | LATENT,
    SMALL_LLAMA | LATENT | {"q_lora_rank": 20, "first_k_dense_replace": 2, "n_shared_experts": 1, "attention_bias": True},
    SMALL_LLAMA | LATENT | {"model_type": "deepseek_v3", "q_lora_rank": 20, "n_group": 2, "topk_group": 1},
    {
        "model_type": "bert",
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 100,
        "vocab_size": 300,
        "max_position_embeddings": 64,
    },
]
PUBLISHED = {
    "deepseek-llm-7b": 6_910_365_696, "llama-3-8b": 8_030_261_248, "llama-2-13b": 13_015_864_320, "gpt2": 124_439_808,
    "smollm2-135m": 134_515_008, "baichuan-7b": 7_000_559_616, "baichuan-13b": 13_264_901_120, "baichuan2-7b": 7_505_973_248,
    "baichuan2-13b": 13_896_668_160, "bert-base": 109_514_298, "bert-large": 335_174_458,
}  # fmt: skip
"""To the parameter, as model cards and papers have them."""
ROUNDED = {
    "deepseek-llm-67b": (67.4, 67.4), "deepseek-v2-lite": (15.7, 2.66), "deepseek-v2": (236, 21.4), "deepseek-v3": (671, 37.6),
    "llama-7b": (6.7, 6.7), "llama-13b": (13.0, 13.0), "llama-33b": (32.5, 32.5), "llama-65b": (65.2, 65.2),
    "llama-2-7b": (6.74, 6.74), "llama-2-70b": (69.0, 69.0), "llama-3-70b": (70.6, 70.6), "llama-3.1-8b": (8.03, 8.03),
    "llama-3.1-70b": (70.6, 70.6), "llama-3.1-405b": (405.9, 405.9), "llama-3.2-1b": (1.24, 1.24), "llama-3.2-3b": (3.21, 3.21),
    "llama-3.3-70b": (70.6, 70.6), "yi-6b": (6.06, 6.06), "yi-9b": (8.83, 8.83), "yi-34b": (34.4, 34.4),
    "qwen2.5-0.5b": (0.494, 0.494), "qwen2.5-1.5b": (1.54, 1.54), "qwen2.5-3b": (3.09, 3.09), "qwen2.5-7b": (7.62, 7.62),
    "qwen2.5-14b": (14.8, 14.8), "qwen2.5-32b": (32.8, 32.8), "qwen2.5-72b": (72.7, 72.7), "qwen3-0.6b": (0.596, 0.596),
    "qwen3-1.7b": (1.72, 1.72), "qwen3-4b": (4.02, 4.02), "qwen3-8b": (8.19, 8.19), "qwen3-14b": (14.8, 14.8),
    "qwen3-32b": (32.8, 32.8), "qwen3-30b-a3b": (30.5, 3.35), "qwen3-235b-a22b": (235, 22.2), "mistral-7b-v0.1": (7.24, 7.24),
    "mistral-7b-v0.3": (7.25, 7.25), "mixtral-8x7b": (46.7, 12.9), "mixtral-8x22b": (140.6, 39.2),
    "gpt2-medium": (0.355, 0.355), "gpt2-large": (0.774, 0.774), "gpt2-xl": (1.558, 1.558), "gpt3-6.7b": (6.66, 6.66),
    "gpt3-13b": (12.85, 12.85), "deepseek-llm-tiny": (0.0084, 0.0084),
}  # fmt: skip
"""Billions: all, and those a token goes through (embedding included), as published to two or three digits."""
BUILT = tuple(name for name in model_names() if model_config(name)["model_type"] != "baichuan")
"""Transformers has no Baichuan."""


def build_on_meta(config: dict[str, Any]) -> PreTrainedModel:
    fields = {name: value for name, value in config.items() if name != "model_type"}
    kind = AutoModelForMaskedLM if config["model_type"] == "bert" else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(AutoConfig.for_model(config["model_type"], **fields))


def blocks_of(model: PreTrainedModel) -> torch.nn.ModuleList:
    base = model.base_model
    return getattr(base, "layers", None) or getattr(base, "h", None) or base.encoder.layer


def numbers(parameters: Iterable[torch.nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


@pytest.mark.parametrize("config", [*(model_config(name) for name in BUILT), *VARIANTS], ids=str)
def test_counts_are_those_of_the_built_model(config: dict[str, Any]) -> None:
    model, shape = build_on_meta(config), model_shape(config, "x")
    blocks, head = blocks_of(model), model.get_output_embeddings()
    experts = [p for name, p in blocks.named_parameters() if ".experts." in name]
    active = numbers(experts) * shape.active_experts // max(1, shape.experts)
    matrices = numbers(p for p in blocks.parameters() if p.dim() == 2) + head.weight.numel() + active
    if config["model_type"] == "bert":
        matrices += model.cls.predictions.transform.dense.weight.numel()
    assert shape.parameters == numbers(model.parameters())
    assert shape.block_sizes == tuple(numbers(block.parameters()) for block in blocks)
    assert shape.block_parameters == max(shape.block_sizes)
    assert shape.outside_blocks == numbers(model.parameters()) - numbers(blocks.parameters())
    assert shape.matmul_parameters == matrices
    assert shape.idle_parameters == numbers(experts) - active
    assert shape.layers == len(blocks) == model.config.num_hidden_layers
    assert (shape.heads, shape.hidden, shape.vocab) == (
        model.config.num_attention_heads, model.config.hidden_size, head.weight.shape[0])  # fmt: skip
    assert shape.tied == (head.weight is model.get_input_embeddings().weight)
    assert shape.max_positions == model.config.max_position_embeddings


def test_published_sizes() -> None:
    assert sorted({**PUBLISHED, **ROUNDED}) == sorted(model_names())
    for name, count in PUBLISHED.items():
        assert model_shape(model_config(name), name).parameters == count, name
    for name, (total, active) in ROUNDED.items():
        shape = model_shape(model_config(name), name)
        assert shape.parameters == pytest.approx(total * 1e9, rel=6e-3), name
        assert shape.active_parameters == pytest.approx(active * 1e9, rel=6e-3), name


def test_every_catalogue_model_has_a_source() -> None:
    assert all("http" in model_source(name) or "arXiv" in model_source(name) for name in model_names() if "tiny" not in name)


def test_flops_a_token_of_deepseek_7b() -> None:
    assert model_shape(model_config("deepseek-llm-7b"), "x").flops_a_token(4096) == pytest.approx(41.96e9, rel=2e-3)


def test_attention_flops_by_hand() -> None:
    llama = model_shape(SMALL_LLAMA, "x")  # 3 layers of 6 heads of 16
    assert llama.attention_flops_a_token(128) == 12 * 3 * 96 * 64
    window = model_shape(SMALL_LLAMA | {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 32}, "x")
    # of 128 positions the first 32 see 16 on average, the others 32: (32 x 16 + 96 x 32) / 128 = 28
    assert window.attention_flops_a_token(128) == 12 * 3 * 96 * 28
    assert window.attention_flops_a_token(16) == 12 * 3 * 96 * 8
    bert = model_shape({"model_type": "bert"}, "x")
    assert bert.attention_flops_a_token(512) == 12 * 12 * 768 * 512
    latent = model_shape(SMALL_LLAMA | LATENT, "x")  # 6 heads; keys of 12 + 8, values of 10
    assert latent.attention_flops_a_token(100) == 12 * 3 * 6 * 15 * 50


def test_dimensions_of_experts_and_latent_attention() -> None:
    shape = model_shape(SMALL_LLAMA | LATENT, "x")
    assert (shape.ffn, shape.head_dim, shape.value_dim, shape.latent) == (3 * 24 + 2 * 24, 20, 10, 16 + 8)
    assert (shape.experts, shape.active_experts) == (8, 3)
    assert model_shape(SMALL_LLAMA | {"model_type": "mixtral", "num_local_experts": 4}, "x").ffn == 2 * 160


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({}, 0),
        ({"sliding_window": 64}, 64),
        ({"sliding_window": 64, "use_sliding_window": False}, 0),
        ({"sliding_window": 64, "layer_types": ["sliding_attention"] * 3}, 64),
        ({"sliding_window": 64, "layer_types": ["full_attention"] + ["sliding_attention"] * 2}, 0),
    ],
)
def test_a_window_counts_only_where_every_layer_has_it(fields: dict[str, Any], window: int) -> None:
    assert model_shape(SMALL_LLAMA | {"model_type": "qwen2", "num_key_value_heads": 2} | fields, "x").window == window


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "baichuan"])
def test_known_fields_are_those_of_transformers(kind: str) -> None:
    assert set(CONFIG_MAPPING[kind]().to_dict()) <= known_fields(kind)


def test_unknown_name_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"'deepseek-7b' is not in the model catalogue; did you mean deepseek-llm-7b"):
        model_config("deepseek-7b")
    with pytest.raises(InputError, match=r"it has .*deepseek-llm-7b, "):
        model_config("zzz")


def test_unknown_family_names_the_known() -> None:
    with pytest.raises(
        InputError, match="family 'mamba' is not known in this version; known: llama, mistral, qwen2, qwen3, baichuan, gpt2, "
    ):
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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SMALL_LLAMA | QWEN_EXPERTS | {"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) is more than its 8 experts"),
        (SMALL_LLAMA | LATENT | {"n_group": 3}, r"n_routed_experts \(8\) must be a multiple of n_group \(3\)"),
        ({"model_type": "bert", "is_decoder": True}, "a bert that decodes is not known here"),
        (SMALL_LLAMA | {"model_type": "baichuan", "model_max_length": 0}, "model_max_length is 0"),
    ],
)
def test_unsound_config_of_other_families_is_refused(config: dict[str, Any], message: str) -> None:
    config = {
        name: value for name, value in config.items() if name != "max_position_embeddings" or "baichuan" not in config.values()
    }
    with pytest.raises(InputError, match=message):
        model_shape(config, "x")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("deepseek-llm-7b", "deepseek-llm-7b"),
        ("deepseek-ai/deepseek-llm-7b-base", "deepseek-llm-7b"),
        ("deepseek-ai/deepseek-llm-7b-chat", "deepseek-llm-7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("meta-llama/Llama-2-13b-hf", "llama-2-13b"),
        ("someone/llama-2-13b", None),
        ("Qwen/Qwen2.5-7B-Instruct-1M", None),
        ("llama-2", None),
    ],
)
def test_hub_names_that_mean_a_catalogue_model(text: str, name: str | None) -> None:
    assert catalogue_name(text) == name


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
