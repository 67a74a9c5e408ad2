"""Causal attention within segments, as one function that every Hugging Face decoder calls by name.

Registered with Transformers' AttentionInterface but not with its mask interface, so that Transformers builds no S x S mask;
the segments come as `cu_seqlens` beside the batch. Rejected: Transformers' own detection of packing from position ids (it
builds a mask of S x S, and its SDPA path ignores restarts where a cache or a mask is present), and FlexAttention (its block
masks must be built for each batch, and it does not run in fp64 on a CPU).

Which kernel: one segment a row: SDPA. Several, on a GPU in bf16 or fp16: PyTorch's varlen flash kernel. Several elsewhere:
SDPA segment by segment, which is the unpacked computation itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "muletrain"
_SHARED_HEADS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in (varlen_attn.__kwdefaults__ or ()) else {}
"""The varlen kernel shares key heads among query heads; from PyTorch 2.13 on it wants to be told so."""
_HALF = (torch.bfloat16, torch.float16)
_UNSUPPORTED = {
    "sliding_window": "a sliding window",
    "softcap": "soft-capped scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
}


def register() -> None:
    """Makes `attn_implementation="muletrain"` known to Transformers. Calling it again changes nothing."""
    AttentionInterface.register(NAME, segment_attention)


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int = 0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention; positions see their own segment only.

    Shapes: query [B, heads, S, D], key and value [B, kv heads, S, D]; cu_seqlens [K + 1] int32 bounds the segments of the
    flattened B x S positions (repeated bounds are empty segments), empty or None: each row is one segment. Returns
    ([B, S, heads, D], None). Raises ValueError for a mask or a kind of attention that this function does not compute.
    """
    if attention_mask is not None:
        raise ValueError("segment attention takes no mask: segments come as cu_seqlens")
    for name, what in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} asks for {what}, which segment attention does not compute")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise ValueError(f"{type(module).__name__} looks ahead, which segment attention does not compute")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if cu_seqlens is None or cu_seqlens.numel() == 0:
        return _causal(query, key, value, dropout, scale).transpose(1, 2).contiguous(), None
    batch, heads, length, _ = query.shape
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    if dropout == 0.0 and _varlen_can(query, value):
        causal: dict[str, Any] = {"scale": scale, "window_size": (-1, 0), **_SHARED_HEADS}
        output: Any = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **causal)
    else:
        output = _by_segment(query, key, value, cu_seqlens, dropout, scale)
    return output.view(batch, length, heads, value.shape[-1]), None


def _causal(query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float) -> Tensor:
    """SDPA over whole rows. [B, heads, S, D] -> [B, heads, S, D]."""
    groups = query.shape[1] // key.shape[1]
    native = groups > 1 and key.shape[-1] == value.shape[-1] <= 256 and not (query.is_cuda and query.dtype not in _HALF)
    if groups > 1 and not native:  # no fused kernel shares heads here; the fallback would hold S x S scores
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=native)


def _by_segment(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, dropout: float, scale: float) -> Tensor:
    """SDPA a segment at a time. [T, heads, D] -> [T, heads, D]. Reads the bounds on the host."""
    lengths = [n for n in cu_seqlens.diff().tolist() if n]
    parts = [
        _causal(*(t.transpose(0, 1).unsqueeze(0) for t in segment), dropout, scale).squeeze(0).transpose(0, 1)
        for segment in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
    ]
    return torch.cat(parts)


def _varlen_can(query: Tensor, value: Tensor) -> bool:
    head_dim = query.shape[-1]
    return query.is_cuda and query.dtype in _HALF and value.shape[-1] == head_dim <= 256 and head_dim % 8 == 0
