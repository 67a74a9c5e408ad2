"""Segments never see each other, and what the kernel cannot compute is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from muletrain.models.attention import segment_attention

NONE = torch.empty(0, dtype=torch.int32)


def _qkv(batch: int, length: int, heads: int = 4, kv_heads: int = 2, width: int = 8, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(batch, n, length, width, dtype=torch.float64, generator=generator, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )


def _attend(*qkv: Tensor, bounds: Tensor = NONE, longest: int = 0, **kwargs: object) -> Tensor:
    return segment_attention(nn.Identity(), *qkv, None, cu_seqlens=bounds, max_seqlen=longest, **kwargs)[0]


def _masked_reference(qkv: tuple[Tensor, ...], segments: Tensor) -> Tensor:
    """Plain attention with an explicit mask: causal and of the same segment. segments [B, S]."""
    query, key, value = qkv
    groups = query.shape[1] // key.shape[1]
    length = query.shape[2]
    mask = torch.ones(length, length, dtype=torch.bool).tril() & (segments[:, :, None] == segments[:, None, :])
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None]).transpose(1, 2)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_one_segment_a_row_is_causal_attention(kv_heads: int) -> None:
    qkv = _qkv(3, 11, kv_heads=kv_heads)
    torch.testing.assert_close(_attend(*qkv), _masked_reference(qkv, torch.zeros(3, 11)), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("bounds", "segments"),
    [
        ([0, 3, 12, 19, 24], [[0] * 3 + [1] * 9, [2] * 7 + [3] * 5]),
        ([0, 12, 24, 24, 24], [[0] * 12, [1] * 12]),  # one document a row, tail repeated
        ([0, 1, 2, 12, 24], [[0, 1] + [2] * 10, [3] * 12]),  # documents of one token
    ],
)
def test_P01_packed_equals_an_explicit_mask(bounds: list[int], segments: list[list[int]]) -> None:
    qkv = _qkv(2, 12)
    expected = _masked_reference(qkv, torch.tensor(segments))
    actual = _attend(*qkv, bounds=torch.tensor(bounds, dtype=torch.int32), longest=12)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    weights = torch.randn(actual.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(
        torch.autograd.grad((actual * weights).sum(), qkv), torch.autograd.grad((expected * weights).sum(), qkv), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_scaling_is_the_models_own() -> None:
    qkv = _qkv(1, 6)
    default, asked = _attend(*qkv), _attend(*qkv, scaling=8**-0.5)
    assert torch.equal(default, asked)
    assert not torch.allclose(default, _attend(*qkv, scaling=1.0))
    bounds = torch.tensor([0, 6], dtype=torch.int32)
    torch.testing.assert_close(_attend(*qkv, bounds=bounds, longest=6, scaling=0.5), _attend(*qkv, scaling=0.5))


def test_dropout_drops_in_packed_rows_too() -> None:
    qkv = _qkv(1, 12)
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    torch.manual_seed(0)
    dropped = _attend(*qkv, bounds=bounds, longest=7, dropout=0.5)
    torch.manual_seed(0)
    assert torch.equal(dropped, _attend(*qkv, bounds=bounds, longest=7, dropout=0.5))
    assert not torch.allclose(dropped, _attend(*qkv, bounds=bounds, longest=7))


@pytest.mark.parametrize("name", ["sliding_window", "softcap", "s_aux", "position_bias"])
def test_P02_what_it_cannot_compute_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="segment attention does not compute"):
        _attend(*_qkv(1, 4), **{name: 4})


def test_P02_attention_that_looks_ahead_is_refused() -> None:
    module = nn.Identity()
    module.is_causal = False
    for target, kwargs in ((module, {}), (nn.Identity(), {"is_causal": False})):
        with pytest.raises(ValueError, match="Identity looks ahead"):
            segment_attention(target, *_qkv(1, 4), None, **kwargs)


def test_P02_a_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="takes no mask"):
        segment_attention(nn.Identity(), *_qkv(1, 4), torch.ones(1, 1, 4, 4))


def test_unused_arguments_of_families_are_let_pass() -> None:
    kwargs = {"position_ids": torch.arange(4), "use_cache": False, "sliding_window": None, "config": SimpleNamespace()}
    assert _attend(*_qkv(1, 4), **kwargs).shape == (1, 4, 4, 8)
