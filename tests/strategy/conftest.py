"""Tiny models that the strategy tests train, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from muletrain.spec.plan import ModelPlan
from tests.families.tiny import model_plan, tiny_gpt2, tiny_llama, tiny_qwen3

DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelPlan]:
    """By family: untied LLaMA, tied Qwen3 with a prime vocabulary, GPT-2 with dropout."""
    folder: Path = tmp_path_factory.mktemp("models")
    return {
        "llama": model_plan(tiny_llama(folder / "llama", num_hidden_layers=3)),
        "qwen3": model_plan(tiny_qwen3(folder / "qwen3", num_hidden_layers=3)),
        "gpt2": model_plan(tiny_gpt2(folder / "gpt2", n_layer=3, **DROPOUT)),
    }
