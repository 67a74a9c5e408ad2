"""Shapes of families without experts: LLaMA and its kin (Mistral, Qwen2, Qwen3, Baichuan), GPT-2 and BERT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from muletrain.catalog.fields import Config, divides, positions, whole, window
from muletrain.spec.errors import InputError
from muletrain.spec.model_shape import Linear, ModelShape


@dataclass(frozen=True)
class Attention:
    """Grouped heads of one block."""

    heads: int
    kv_heads: int
    head_dim: int
    matrices: int
    vectors: int
    linears: tuple[Linear, ...]


def linear_layers(part: str, sizes: dict[str, tuple[int, int]]) -> tuple[Linear, ...]:
    """The linear layers {name: (inputs, outputs)} of one part of a block."""
    return tuple(Linear(name=f"{part}.{name}", inputs=inputs, outputs=outputs) for name, (inputs, outputs) in sizes.items())


def _gated(hidden: int, ffn: int) -> tuple[Linear, ...]:
    return linear_layers("mlp", {"gate_proj": (hidden, ffn), "up_proj": (hidden, ffn), "down_proj": (ffn, hidden)})


def grouped_attention(config: Config, name: str) -> Attention:
    """Dimensions and parameters of rotary attention with grouped heads, as the family of `config` has it.

    qwen2 has biases on queries, keys and values; qwen3 norms on queries and keys and a head width of its own.
    """
    kind = str(config["model_type"])
    own_norms = kind in ("qwen3", "qwen3_moe")
    hidden, heads = whole(config, name, "hidden_size"), whole(config, name, "num_attention_heads")
    defaults = {"qwen3": 32, "qwen2": 32, "mistral": 8, "mixtral": 8, "qwen3_moe": 4}
    absent = defaults.get(kind, heads) if "num_key_value_heads" not in config else heads  # null means: as many as heads
    kv_heads = heads if kind == "baichuan" else whole(config, name, "num_key_value_heads", absent)
    divides(name, ("num_attention_heads", heads), ("num_key_value_heads", kv_heads))
    wide = 128 if kind == "qwen3" else None
    if not config.get("head_dim") and wide is None:
        divides(name, ("hidden_size", hidden), ("num_attention_heads", heads))
    head_dim = whole(config, name, "head_dim", wide or hidden // heads)
    width, kv_width = heads * head_dim, kv_heads * head_dim
    vectors = 2 * head_dim if own_norms else 0
    if kind == "qwen2":
        vectors += width + 2 * kv_width
    elif config.get("attention_bias"):
        vectors += width + 2 * kv_width + hidden
    linears = linear_layers(
        "self_attn",
        {"q_proj": (hidden, width), "k_proj": (hidden, kv_width), "v_proj": (hidden, kv_width), "o_proj": (width, hidden)},
    )
    return Attention(heads, kv_heads, head_dim, hidden * (2 * width + 2 * kv_width), vectors, linears)


def rotary_shape(config: Config, name: str) -> ModelShape:
    """llama, mistral, qwen2, qwen3, baichuan: RMS norms, rotary positions, gated feed-forward, grouped heads."""
    hidden, ffn = whole(config, name, "hidden_size"), whole(config, name, "intermediate_size")
    layers, vocab = whole(config, name, "num_hidden_layers"), whole(config, name, "vocab_size")
    attention = grouped_attention(config, name)
    matrices = attention.matrices + 3 * hidden * ffn
    vectors = attention.vectors + 2 * hidden + (2 * ffn + hidden if config.get("mlp_bias") else 0)
    tied = bool(config.get("tie_word_embeddings", False))
    block = matrices + vectors
    return ModelShape(
        name=name,
        family=str(config["model_type"]),
        hidden=hidden,
        layers=layers,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        ffn=ffn,
        vocab=vocab,
        tied=tied,
        max_positions=_baichuan_positions(config, name) if config["model_type"] == "baichuan" else positions(config, name),
        parameters=vocab * hidden * (1 if tied else 2) + layers * block + hidden,
        block_parameters=block,
        matmul_parameters=layers * matrices + vocab * hidden,
        window=window(config, name),
        linears=() if config["model_type"] == "baichuan" else attention.linears + _gated(hidden, ffn),  # it packs q, k and v
    )


def _baichuan_positions(config: Config, name: str) -> int:
    """The 13B ones, with ALiBi, call it model_max_length."""
    field = "max_position_embeddings" if config.get("max_position_embeddings") else "model_max_length"
    return whole(config, name, field, 4096)


def gpt2_shape(config: Config, name: str) -> ModelShape:
    """gpt2: layer norms with bias, learned positions, plain feed-forward, biases everywhere."""
    hidden = whole(config, name, "n_embd", 768)
    layers, heads = whole(config, name, "n_layer", 12), whole(config, name, "n_head", 12)
    vocab, places = whole(config, name, "vocab_size", 50257), whole(config, name, "n_positions", 1024)
    ffn = whole(config, name, "n_inner", 4 * hidden)
    divides(name, ("n_embd", hidden), ("n_head", heads))
    if config.get("add_cross_attention"):
        raise InputError(f"model {name}: add_cross_attention is not a decoder-only model; set it to false")
    matrices = 4 * hidden * hidden + 2 * hidden * ffn
    block = matrices + 3 * hidden + hidden + ffn + hidden + 4 * hidden
    tied = bool(config.get("tie_word_embeddings", True))
    return ModelShape(
        parameters=vocab * hidden * (1 if tied else 2) + places * hidden + layers * block + 2 * hidden,
        max_positions=places,
        linears=linear_layers("attn", {"c_attn": (hidden, 3 * hidden), "c_proj": (hidden, hidden)})
        + linear_layers("mlp", {"c_fc": (hidden, ffn), "c_proj": (ffn, hidden)}),
        **_plain(config, name, hidden, layers, heads, ffn, vocab, tied, block, layers * matrices + vocab * hidden),
    )


def bert_shape(config: Config, name: str) -> ModelShape:
    """bert with its masked language model head: layer norms after each part, all positions seen, one more layer at the end."""
    hidden, ffn = whole(config, name, "hidden_size", 768), whole(config, name, "intermediate_size", 3072)
    layers, heads = whole(config, name, "num_hidden_layers", 12), whole(config, name, "num_attention_heads", 12)
    vocab, places = whole(config, name, "vocab_size", 30522), whole(config, name, "max_position_embeddings", 512)
    types = whole(config, name, "type_vocab_size", 2)
    divides(name, ("hidden_size", hidden), ("num_attention_heads", heads))
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise InputError(
            f"model {name}: a bert that decodes is not known here; set is_decoder and add_cross_attention to false"
        )
    matrices = 4 * hidden * hidden + 2 * hidden * ffn
    block = matrices + 4 * hidden + ffn + hidden + 4 * hidden
    tied = bool(config.get("tie_word_embeddings", True))
    embedding = (vocab + places + types) * hidden + 2 * hidden
    head = hidden * hidden + hidden + 2 * hidden + vocab + (0 if tied else vocab * hidden)
    return ModelShape(
        parameters=embedding + layers * block + head,
        max_positions=places,
        causal=False,
        **_plain(
            config, name, hidden, layers, heads, ffn, vocab, tied, block, layers * matrices + hidden * hidden + vocab * hidden
        ),
    )


def _plain(
    config: Config, name: str, hidden: int, layers: int, heads: int, ffn: int, vocab: int, tied: bool, block: int, matmul: int
) -> dict[str, Any]:
    """What a block without groups and gates comes to."""
    return {
        "name": name,
        "family": str(config["model_type"]),
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn": ffn,
        "vocab": vocab,
        "tied": tied,
        "block_parameters": block,
        "matmul_parameters": matmul,
        "gated": False,
    }
