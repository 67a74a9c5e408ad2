"""Adapters as files: what plain peft makes of a saved folder, and what merging gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from muletrain.models.adapter_folder import base_of, merged_tensors, read_config, save_adapter_folder, verify_adapter_folder
from muletrain.models.build import build_on_meta
from muletrain.models.lora import lora_config, matrix_of
from muletrain.models.weights import PretrainedWeights, open_weights
from muletrain.planner.adapter import plan_adapter
from muletrain.planner.source import read_model
from muletrain.spec.errors import InputError
from muletrain.spec.plan import ModelPlan
from muletrain.spec.recipe import AdapterSection, ModelSection
from tests.families.tiny import tiny_gpt2, tiny_llama, tiny_qwen3

FAMILIES = {"llama": tiny_llama, "qwen3": tiny_qwen3, "gpt2": tiny_gpt2}


def planned(folder: Path, **fields: Any) -> ModelPlan:
    model, _ = read_model(ModelSection(source=str(folder)))
    adapter = plan_adapter(AdapterSection(kind="lora", **{"rank": 3, **fields}), model, [])
    return model.model_copy(update={"adapter": adapter})


def trained(plan: ModelPlan) -> tuple[Any, dict[str, torch.Tensor]]:
    """(the model on the meta device, values as if trained: no matrix is zero)."""
    model = build_on_meta(plan, dtype=torch.float32, loss_chunk=64)
    weights = open_weights(plan, model, 5)
    torch.manual_seed(3)
    return model, {name: weights.tensor(name) + 0.1 * torch.randn(1) for name in weights.names if matrix_of(name)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rslora", [False, True])
def test_plain_peft_loads_the_folder_and_merging_gives_its_logits(family: str, rslora: bool, tmp_path: Path) -> None:
    """Through peft: base + adapter. Through us: W + scale x B A as an ordinary model. And both differ from the base."""
    plan = planned(FAMILIES[family](tmp_path / "base"), rslora=rslora, alpha=5.0)
    model, values = trained(plan)
    folder = tmp_path / "adapter"
    tensors = list(values.items())
    save_adapter_folder(folder, lora_config(plan.adapter, model.hf), tensors, dtype=torch.float32, tokenizer_folder=None)
    verify_adapter_folder(folder, model.config)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(plan.source).eval()
        plain = base(ids).logits
        adapted = PeftModel.from_pretrained(base, str(folder)).eval()(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(plan.source).eval()
        parts = dict(merged_tensors(folder, PretrainedWeights(plan.source, merged)))
        for name, parameter in merged.named_parameters():
            parameter.copy_(parts[name])
        assert (adapted - plain).abs().max() > 0.05
        torch.testing.assert_close(merged(ids).logits, adapted, rtol=1e-4, atol=1e-4)


def test_the_folder_says_what_it_is(tmp_path: Path) -> None:
    plan = planned(tiny_llama(tmp_path / "base"), targets=("v_proj", "q_proj"), alpha=6.0, dropout=0.05)
    model, values = trained(plan)
    folder = tmp_path / "adapter"
    save_adapter_folder(
        folder, lora_config(plan.adapter, model.hf), values.items(), dtype=torch.bfloat16, tokenizer_folder=Path(plan.source)
    )
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["task_type"] == "CAUSAL_LM" and config["inference_mode"] is True
    assert config["base_model_name_or_path"] == str((tmp_path / "base").resolve())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (3, 6, 0.05)
    assert config["target_modules"] == ["q_proj", "v_proj"]
    stored = load_file(folder / "adapter_model.safetensors")
    assert len(stored) == 8 and {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert stored["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"].shape == (3, 64)
    assert (folder / "tokenizer.json").is_file()


def test_a_folder_that_peft_could_not_use_is_named(tmp_path: Path) -> None:
    plan = planned(tiny_llama(tmp_path / "base"))
    model, values = trained(plan)
    folder = tmp_path / "adapter"
    config = lora_config(plan.adapter, model.hf)
    save_adapter_folder(folder, config, list(values.items())[1:], dtype=torch.float32, tokenizer_folder=None)
    with pytest.raises(InputError, match=r"layers\.0\.self_attn\.q_proj\.lora_A\.weight is absent and should be \[3, 64\]"):
        verify_adapter_folder(folder, model.config)
    save_file({"base_model.model.other.lora_A.weight": torch.zeros(1)}, folder / "adapter_model.safetensors")
    with pytest.raises(InputError, match=r"other\.lora_A\.weight belongs to no layer of its base, /"):
        list(merged_tensors(folder, PretrainedWeights(plan.source, model.hf.__class__(model.config))))
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(InputError, match="base_model_name_or_path is empty"):
        base_of(folder)
    (folder / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(InputError, match="only LoRA can"):
        read_config(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read as an adapter's configuration"):
        read_config(folder)


def test_first_values_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    plan = planned(tiny_llama(tmp_path / "base"))
    model = build_on_meta(plan, dtype=torch.bfloat16, loss_chunk=64)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    one, same, other = (open_weights(plan, model, seed) for seed in (1, 1, 2))
    a = [name for name in one.names if matrix_of(name) == "A"]
    assert len(a) == 14 and all(torch.equal(one.tensor(n), same.tensor(n)) for n in one.names)
    assert not any(torch.equal(one.tensor(name), other.tensor(name)) for name in a)
    assert not torch.equal(one.tensor(a[0]), one.tensor(a[1]))
    bound = 1 / 8  # 1 / sqrt(64 inputs), peft's Kaiming rule
    assert 0.9 * bound < one.tensor(a[0]).abs().max() <= bound
    assert all(not one.tensor(name).any() for name in one.names if matrix_of(name) == "B")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_catalogues_linear_layers_are_the_models(family: str, tmp_path: Path) -> None:
    plan = planned(FAMILIES[family](tmp_path / "base"))
    model = build_on_meta(plan, dtype=torch.float32, loss_chunk=64)
    adapted = {name for name, module in model.layers[0].named_modules() if hasattr(module, "lora_A")}
    assert adapted == {linear.name for linear in plan.shape.linears}
    assert {name for name, p in model.layers[0].named_parameters() if p.ndim == 2 and not p.requires_grad} == {
        f"{linear.name}.base_layer.weight" for linear in plan.shape.linears
    }
