"""Building on the meta device: fields, refusals, buffers, ties."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from muletrain.models.build import build_on_meta, materialize_buffers
from muletrain.models.causal import CausalModel
from muletrain.spec.errors import InputError
from tests.families.tiny import model_plan, tiny_gpt2, tiny_llama, tiny_qwen3
from tests.models.loading import load


def _build(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> CausalModel:
    plan = model_plan(folder)
    return build_on_meta(plan.model_copy(update={"config": plan.config | changes}), dtype=dtype, loss_chunk=8)


def test_nothing_is_allocated_and_training_is_on(tmp_path: Path) -> None:
    model = _build(tiny_llama(tmp_path), torch.bfloat16)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.training and all(module.training for module in model.modules())


def test_overrides_take_effect(tmp_path: Path) -> None:
    assert len(_build(tiny_llama(tmp_path), num_hidden_layers=3).layers) == 3


def test_config_is_read_from_the_source_where_the_plan_has_none(tmp_path: Path) -> None:
    plan = model_plan(tiny_llama(tmp_path)).model_copy(update={"config": {}})
    assert len(build_on_meta(plan, dtype=torch.float32, loss_chunk=8).layers) == 2


def test_a_source_without_a_config_is_named(tmp_path: Path) -> None:
    plan = model_plan(tiny_llama(tmp_path)).model_copy(update={"config": {}, "source": str(tmp_path / "none")})
    with pytest.raises(InputError, match=r"the config of .*none cannot be read"):
        build_on_meta(plan, dtype=torch.float32, loss_chunk=8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hiden_layers": 4}, r"overrides\.num_hiden_layers: llama has no such field; did you mean num_hidden_layers\?"),
        ({"model_type": "lama"}, r"'lama' is no family that Transformers knows; did you mean llama\?"),
        ({"hidden_size": "wide"}, r"llama refuses its config: .*hidden_size"),
        ({"hidden_size": 66}, r"llama refuses its config: .*not a multiple"),
    ],
)
def test_wrong_fields_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        _build(tiny_llama(tmp_path), **changes)


def test_fields_of_the_sources_own_file_are_let_pass(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, my_note="kept")
    assert _build(folder).config.my_note == "kept"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, r"mistral cannot be trained here: .*sliding window of 16"),
        ({"model_type": "gemma2"}, r"gemma2 cannot be trained here: .*sliding window.*soft-capped.*final_logit_softcapping"),
        ({"model_type": "granite", "logits_scaling": 8.0}, r"granite cannot be trained here: .*logits_scaling"),
        ({"model_type": "t5"}, r"t5 cannot be trained here: it is not decoder-only"),
        ({"model_type": "bloom"}, r"bloom cannot be trained here: .*ALiBi"),
        ({"model_type": "falcon", "num_hidden_layers": 2}, r"falcon computes attention in its own way"),
        ({"model_type": "stablelm", "num_hidden_layers": 2}, r"stablelm mixes positions in its own way"),
        ({"model_type": "llama4_text", "num_hidden_layers": 2}, r"llama4_text cannot be trained here: .*chunked_attention"),
        (
            {"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
            r"lfm2 cannot be trained here: it has layers of kind conv",
        ),
        ({"model_type": "vit"}, r"vit is no causal language model"),
        ({"model_type": "bert", "num_hidden_layers": 2}, r"bert has more than a linear head"),
        ({"model_type": "deepseek_v3", "num_hidden_layers": 4}, r"deepseek_v3 keeps state in buffers \(.*bias\)"),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}},
            r"llama cannot .*: its weights are quantized",
        ),
        ({"model_type": "gpt_oss"}, r"gpt_oss cannot be trained here: .*sinks"),
    ],
)
def test_P02_families_that_need_other_attention_or_loss_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    plan = model_plan(tiny_llama(tmp_path)).model_copy(update={"source": "nowhere", "config": changes})
    with pytest.raises(InputError, match=message):
        build_on_meta(plan, dtype=torch.float32, loss_chunk=8)


ROPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "yarn": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    },
}


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_are_those_of_construction(rope: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, **ROPES[rope])
    model = _build(folder, dtype)
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.fill_(torch.nan)
    materialize_buffers(model, "cpu")
    expected = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).named_buffers())
    actual = dict(model.hf.named_buffers())
    assert actual.keys() == expected.keys() and actual
    for name, buffer in actual.items():
        assert buffer.dtype == torch.float32 and torch.equal(buffer, expected[name])


def test_buffers_that_cannot_be_made_again_are_an_error() -> None:
    module = torch.nn.Module()
    module.register_buffer("table", torch.zeros(2), persistent=False)
    with pytest.raises(InputError, match=r"buffers of child \(Module\) cannot be computed again"):
        materialize_buffers(torch.nn.ModuleDict({"child": module}), "cpu")


@pytest.mark.parametrize("family", [tiny_qwen3, tiny_gpt2])
def test_C06_tied_weights_stay_one_parameter(family: Callable[..., Path], tmp_path: Path) -> None:
    plan = model_plan(family(tmp_path))
    model = load(plan)
    assert model.tied and model.head.weight is model.hf.get_input_embeddings().weight
    assert sum(p.numel() for p in model.parameters()) == plan.shape.parameters


def test_C06_untied_weights_stay_two(tmp_path: Path) -> None:
    assert not load(model_plan(tiny_llama(tmp_path))).tied


def test_model_without_a_list_of_layers_is_refused() -> None:
    hf = torch.nn.Module()
    hf.config = type("Config", (), {"num_hidden_layers": 2, "model_type": "odd"})()
    with pytest.raises(InputError, match=r"odd has no list of 2 decoder layers; families that work: llama"):
        CausalModel(hf, 8)
