"""Tiny Hugging Face folders of the supported families: config, random weights, byte-level tokenizer, chat template.

Small enough to train in a test, odd enough to catch mistakes: grouped heads, tied and untied heads, a prime vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from muletrain.spec.model_shape import ModelShape
from muletrain.spec.plan import ModelPlan

TEXT = [
    "The mule walked down the long road, and the train of mules walked behind it in a line.",
    "def carry(load, road):\n    for step in road:\n        load = load + step\n    return load\n",
    "A small animal that is cheap and sturdy can carry a heavy load when there are many of them.",
    "class Train:\n    def __init__(self, mules):\n        self.mules = mules\n",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(vocab: int = 400, bos: str | None = "<s>", eos: str | None = "</s>") -> PreTrainedTokenizerFast:
    """A byte-level BPE that knows every byte and has no pad token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token in (bos, eos) if token]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT * 8, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, chat_template=CHAT_TEMPLATE)


def tiny_llama(folder: Path, **overrides: Any) -> Path:
    """LLaMA: 2 layers of 64, 4 heads that share 2 key heads, 512 tokens, untied."""
    fields = {"num_key_value_heads": 2, "intermediate_size": 176, "vocab_size": 512}
    return _write(folder, "llama", {**_SIZES, **fields, **overrides})


def tiny_deepseek(folder: Path, **overrides: Any) -> Path:
    """DeepSeek-LLM, which is LLaMA's architecture with full heads and its own vocabulary and norm constant."""
    fields = {"num_key_value_heads": 4, "intermediate_size": 172, "vocab_size": 640, "rms_norm_eps": 1e-6}
    return _write(folder, "llama", {**_SIZES, **fields, **overrides})


def tiny_qwen3(folder: Path, **overrides: Any) -> Path:
    """Qwen3: norms on queries and keys, tied, a head width of its own, 509 tokens (a prime)."""
    fields = {
        "num_key_value_heads": 2,
        "head_dim": 24,
        "intermediate_size": 176,
        "vocab_size": 509,
        "tie_word_embeddings": True,
        "bos_token_id": None,
    }
    return _write(folder, "qwen3", {**_SIZES, **fields, **overrides})


def tiny_gpt2(folder: Path, **overrides: Any) -> Path:
    """GPT-2: learnt positions, biases, tied, Conv1D weights. Dropout is off unless asked for."""
    fields = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": 512}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return _write(folder, "gpt2", {**fields, **quiet, **_IDS, **overrides})


def model_plan(folder: Path, weights: Literal["pretrained", "random"] = "pretrained") -> ModelPlan:
    """The plan of a folder that one of the functions above wrote."""
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config)
    heads = config.num_attention_heads
    blocks = model.base_model.get_submodule(_LAYERS[config.model_type])
    shape = ModelShape(
        name=folder.name,
        family=config.model_type,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        ffn=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        vocab=config.vocab_size,
        tied=config.tie_word_embeddings,
        max_positions=config.max_position_embeddings,
        parameters=sum(p.numel() for p in model.parameters()),
        block_parameters=sum(p.numel() for p in blocks[0].parameters()),
        matmul_parameters=sum(p.numel() for p in blocks.parameters() if p.ndim == 2) + config.vocab_size * config.hidden_size,
    )
    return ModelPlan(source=str(folder), config=config.to_dict(), weights=weights, shape=shape)


_IDS = {"bos_token_id": 0, "eos_token_id": 1}
_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256, **_IDS}
_LAYERS = {"llama": "layers", "qwen3": "layers", "gpt2": "h"}


def _write(folder: Path, family: str, fields: dict[str, Any]) -> Path:
    state = torch.get_rng_state()
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
    with torch.no_grad():  # norms and biases away from their neutral start, so that a swapped or dropped one shows
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    torch.set_rng_state(state)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
