"""Memory by formula beside memory that is there: state to the byte, activations within 5 % of what autograd saves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from peft import inject_adapter_in_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from muletrain.catalog.families import model_shape
from muletrain.models.lora import lora_config
from muletrain.planner.footprint import Footprint, block_activations
from muletrain.planner.memory import ledger
from muletrain.spec.plan import AdapterPlan
from muletrain.spec.recipe import ComputeDtype
from tests.families.tiny import model_plan, tiny_gpt2, tiny_llama
from tests.strategy.runs import Run, start

LLAMA = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 256, "max_position_embeddings": 512,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": 128, "n_layer": 1, "n_head": 4, "n_positions": 512, "vocab_size": 256, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
ROWS, LENGTH = 2, 128


def footprint(compute: ComputeDtype) -> Footprint:
    return Footprint(
        strategy="resident", activations="keep", compute=compute, compiled=False, device="cpu", workers=1, micro_batch=ROWS,
        micro_batches=1, sequence_length=LENGTH, loss_chunk=64,
    )  # fmt: skip


def saved_bytes(block: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Bytes of the storages that autograd keeps for the backward of one call, parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = block(*args, **kwargs)
    del output
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 2}),
        ("llama", {"intermediate_size": 128}),
        ("mistral", {"num_key_value_heads": 2, "sliding_window": None}),
        ("qwen3", {}),
        ("qwen3", {"num_key_value_heads": 1, "head_dim": 64}),
        ("gpt2", {}),
    ],
)
def test_an_eager_block_keeps_what_is_planned(family: str, changes: dict[str, Any], compute: ComputeDtype) -> None:
    fields = (GPT2 if family == "gpt2" else LLAMA | {"model_type": family}) | changes
    dtype = torch.float32 if compute == "fp32" else torch.bfloat16
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), attn_implementation="sdpa", dtype=dtype)
    hidden = torch.randn(ROWS, LENGTH, 128, requires_grad=True, dtype=dtype)
    if family == "gpt2":
        found = saved_bytes(model.transformer.h[0], hidden)
    else:
        tables = model.model.rotary_emb(hidden, torch.arange(LENGTH).unsqueeze(0))
        found = saved_bytes(model.model.layers[0], hidden, position_embeddings=tables, attention_mask=None)
    assert found == pytest.approx(block_activations(model_shape(fields, "x"), footprint(compute)), rel=0.05)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("targets", [None, ("q_proj", "v_proj")], ids=str)
def test_an_eager_block_with_an_adapter_keeps_no_more_than_is_planned(
    targets: tuple[str, ...] | None, dropout: float, compute: ComputeDtype
) -> None:
    """With all layers adapted within 10 %. A frozen layer without an adapter keeps no input: less than planned."""
    shape = model_shape(LLAMA, "x")
    names = targets or tuple(linear.name for linear in shape.linears)
    adapter = AdapterPlan(kind="lora", rank=8, alpha=8.0, dropout=dropout, targets=names, parameters=1)
    dtype = torch.float32 if compute == "fp32" else torch.bfloat16
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA), attn_implementation="sdpa", dtype=dtype)
    inject_adapter_in_model(lora_config(adapter, model), model)
    block, hidden = model.to(dtype).train().model.layers[0], torch.randn(ROWS, LENGTH, 128, requires_grad=True, dtype=dtype)
    tables = model.model.rotary_emb(hidden, torch.arange(LENGTH).unsqueeze(0))
    found = saved_bytes(block, hidden, position_embeddings=tables, attention_mask=None)
    planned = block_activations(shape, replace(footprint(compute), adapter=adapter))
    assert 0.99 * found <= planned <= (1.4 if targets else 1.1) * found


@pytest.mark.parametrize("compute", [kind for kind in get_args(ComputeDtype) if kind != "fp16"])
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_state_is_planned_to_the_byte(make: Any, compute: ComputeDtype, tmp_path: Path) -> None:
    model = model_plan(make(tmp_path))
    strategy: Any = start(Run(model, compute=compute))
    state = strategy.state_tensors()
    there = {
        "parameters": list(strategy._model.parameters()),
        "gradients": strategy._grads,
        "moments": [*state["exp_avg"].values(), *state["exp_avg_sq"].values()],
    }
    if compute == "bf16":
        there["master"] = list(state["parameter"].values())
    planned = {item.part: item.size_bytes for item in ledger(model.shape, footprint(compute)).items if item.part in there}
    assert {part: sum(t.numel() * t.element_size() for t in tensors) for part, tensors in there.items()} == planned
