"""Shapes of families with experts: Mixtral, Qwen3-MoE, DeepSeek-V2 and V3 (with latent attention).

A token is multiplied with the router and with the experts it is sent to, never with the others: those are idle parameters,
which take memory and no time. Multi-token prediction layers of DeepSeek-V3 are not counted: Transformers does not build them.
"""

from __future__ import annotations

from dataclasses import dataclass

from muletrain.catalog.dense import grouped_attention, linear_layers
from muletrain.catalog.fields import Config, divides, positions, whole, window
from muletrain.spec.errors import InputError
from muletrain.spec.model_shape import Linear, ModelShape


@dataclass(frozen=True)
class _Experts:
    """The feed-forward part of a model's blocks. Widths are of the gated layer."""

    routed: int
    active: int
    shared_width: int
    """Of experts that see every token, together."""
    width: int
    """Of one routed expert."""
    dense_width: int
    """Of blocks without experts."""
    dense: tuple[bool, ...]
    """By block: it has no experts."""


@dataclass(frozen=True)
class _Attention:
    heads: int
    kv_heads: int
    head_dim: int
    matrices: int
    vectors: int
    linears: tuple[Linear, ...]
    value_dim: int = 0
    latent: int = 0


def mixtral_shape(config: Config, name: str) -> ModelShape:
    """mixtral: LLaMA's attention, every block with experts."""
    layers, ffn = whole(config, name, "num_hidden_layers"), whole(config, name, "intermediate_size")
    experts = _Experts(
        routed=whole(config, name, "num_local_experts", 8),
        active=whole(config, name, "num_experts_per_tok", 2),
        shared_width=0,
        width=ffn,
        dense_width=ffn,
        dense=(False,) * layers,
    )
    return _shape(config, name, _grouped(config, name), experts)


def qwen3_moe_shape(config: Config, name: str) -> ModelShape:
    """qwen3_moe: Qwen3's attention; mlp_only_layers, and blocks between steps of decoder_sparse_step, have no experts."""
    layers = whole(config, name, "num_hidden_layers")
    step, only = whole(config, name, "decoder_sparse_step", 1), set(config.get("mlp_only_layers") or ())
    field = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    experts = _Experts(
        routed=whole(config, name, field, 128),
        active=whole(config, name, "num_experts_per_tok", 8),
        shared_width=0,
        width=whole(config, name, "moe_intermediate_size", 768),
        dense_width=whole(config, name, "intermediate_size", 6144),
        dense=tuple(layer in only or (layer + 1) % step != 0 for layer in range(layers)),
    )
    return _shape(config, name, _grouped(config, name), experts)


def deepseek_shape(config: Config, name: str) -> ModelShape:
    """deepseek_v2 and deepseek_v3: latent attention, the first blocks dense, shared experts beside the routed ones."""
    layers = whole(config, name, "num_hidden_layers")
    first = config.get("first_k_dense_replace", 0)
    width = whole(config, name, "moe_intermediate_size", 1407 if config["model_type"] == "deepseek_v2" else 2048)
    experts = _Experts(
        routed=whole(config, name, "n_routed_experts", 64 if config["model_type"] == "deepseek_v2" else 256),
        active=whole(config, name, "num_experts_per_tok", 8),
        shared_width=width * (config.get("n_shared_experts") or 0),
        width=width,
        dense_width=whole(config, name, "intermediate_size"),
        dense=tuple(layer < first for layer in range(layers)),
    )
    return _shape(config, name, _latent(config, name), experts)


def _grouped(config: Config, name: str) -> _Attention:
    found = grouped_attention(config, name)
    return _Attention(found.heads, found.kv_heads, found.head_dim, found.matrices, found.vectors, found.linears)


def _latent(config: Config, name: str) -> _Attention:
    """Queries, keys and values are made from narrow vectors; a part of each key, shared by all heads, carries the position."""
    hidden, heads = whole(config, name, "hidden_size"), whole(config, name, "num_attention_heads")
    rank = whole(config, name, "kv_lora_rank", 512)
    plain, rotary = whole(config, name, "qk_nope_head_dim", 128), whole(config, name, "qk_rope_head_dim", 64)
    value = whole(config, name, "v_head_dim", 128)
    head_dim = plain + rotary
    query_rank = config.get("q_lora_rank")
    if query_rank:
        queries, norms = query_rank * (hidden + heads * head_dim), query_rank + rank
        layers = {"q_a_proj": (hidden, query_rank), "q_b_proj": (query_rank, heads * head_dim)}
    else:
        queries, norms = hidden * heads * head_dim, rank
        layers = {"q_proj": (hidden, heads * head_dim)}
    layers["kv_a_proj_with_mqa"] = (hidden, rank + rotary)
    layers["kv_b_proj"] = (rank, heads * (plain + value))
    layers["o_proj"] = (heads * value, hidden)
    keys = hidden * (rank + rotary) + rank * heads * (plain + value)
    biases = (query_rank or 0) + rank + rotary + hidden if config.get("attention_bias") else 0
    return _Attention(
        heads,
        heads,
        head_dim,
        queries + keys + heads * value * hidden,
        norms + biases,
        linear_layers("self_attn", layers),
        value,
        (query_rank or 0) + rank + rotary,
    )


def _shape(config: Config, name: str, attention: _Attention, experts: _Experts) -> ModelShape:
    hidden, vocab = whole(config, name, "hidden_size"), whole(config, name, "vocab_size")
    if experts.active > experts.routed:
        raise InputError(f"model {name}: num_experts_per_tok ({experts.active}) is more than its {experts.routed} experts")
    if config.get("n_group"):
        divides(name, ("n_routed_experts", experts.routed), ("n_group", whole(config, name, "n_group")))
    one = 3 * hidden * experts.width
    dense = attention.matrices + 3 * hidden * experts.dense_width
    sparse = attention.matrices + hidden * experts.routed + 3 * hidden * experts.shared_width + experts.routed * one
    vectors = attention.vectors + 2 * hidden
    blocks = tuple((dense if plain else sparse) + vectors for plain in experts.dense)
    idle = sum(not plain for plain in experts.dense) * (experts.routed - experts.active) * one
    tied = bool(config.get("tie_word_embeddings", False))
    active_width = experts.active * experts.width + experts.shared_width
    return ModelShape(
        name=name,
        family=str(config["model_type"]),
        hidden=hidden,
        layers=len(blocks),
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        ffn=experts.dense_width if all(experts.dense) else active_width,
        vocab=vocab,
        tied=tied,
        max_positions=positions(config, name),
        parameters=vocab * hidden * (1 if tied else 2) + sum(blocks) + hidden,
        block_parameters=max(blocks),
        matmul_parameters=sum(blocks) - len(blocks) * vectors - idle + vocab * hidden,
        blocks=blocks if len(set(blocks)) > 1 else (),
        value_dim=attention.value_dim if attention.value_dim != attention.head_dim else 0,
        latent=attention.latent,
        experts=experts.routed,
        active_experts=experts.active,
        idle_parameters=idle,
        window=window(config, name),
        linears=attention.linears,
    )
