"""FLOPs by formula are those that a counter sees."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from muletrain.catalog.families import model_shape

TINY = {
    "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "vocab_size": 509, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_S06_forward_and_backward_are_counted(kind: str) -> None:
    """The counter has whole rows of scores, not the causal half, and the backward of attention 2.5 times its forward."""
    fields = {**TINY, "model_type": kind, "head_dim": 16}
    config = AutoConfig.for_model(**{k: v for k, v in fields.items() if k != "head_dim" or kind != "qwen2"})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    shape = model_shape(fields, "x").model_copy(update={"causal": False})
    tokens = torch.zeros(2, 64, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    # the first block's input is looked up, so its gradient is a scatter, not a product: counted all the same by the projections
    assert counter.get_total_flops() == pytest.approx(shape.flops_a_token(64) * tokens.numel(), rel=0.01)


def test_S06_recompute_and_adapters_are_apart() -> None:
    shape = model_shape({**TINY, "model_type": "llama"}, "x")
    attention = shape.attention_flops_a_token(64)
    assert shape.flops_a_token(64) == 6 * shape.matmul_parameters + attention
    assert shape.flops_a_token(64, 1000) == 4 * shape.matmul_parameters + 6 * 1000 + attention
