"""The chunked loss against PyTorch's cross entropy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode

from muletrain.models.loss import _softmax_in_place, _softmax_masked, chunked_cross_entropy


def _inputs(rows: int, hidden: int, vocab: int, dtype: torch.dtype = torch.float64, bias: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + vocab)
    shapes = [(rows, hidden), (vocab, hidden)] + ([(vocab,)] if bias else [])
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def _labels(rows: int, vocab: int, masked: float = 0.3) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    return labels.masked_fill(torch.rand(rows, generator=generator) < masked, -100)


def _reference(inputs: list[Tensor], labels: Tensor) -> Tensor:
    return cross_entropy(linear(*inputs), labels, ignore_index=-100, reduction="sum")


def _chunked(inputs: list[Tensor], labels: Tensor, chunk: int, grad_scale: float = 1.0) -> Tensor:
    bias = inputs[2] if len(inputs) == 3 else None
    return chunked_cross_entropy(inputs[0], inputs[1], labels, chunk, bias, grad_scale)


@pytest.mark.parametrize(
    ("rows", "hidden", "vocab", "chunk"), [(1, 3, 2, 1), (7, 5, 11, 3), (64, 16, 101, 16), (33, 8, 509, 1000)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_value_and_gradients_equal_pytorch_in_fp64(rows: int, hidden: int, vocab: int, chunk: int, bias: bool) -> None:
    inputs, labels = _inputs(rows, hidden, vocab, bias=bias), _labels(rows, vocab)
    expected = _reference(inputs, labels)
    actual = _chunked(inputs, labels, chunk)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.tensor(0.37, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad(actual, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_N14_all_masked_is_exactly_nothing() -> None:
    inputs, labels = _inputs(9, 4, 13, bias=True), torch.full((9,), -100)
    loss = _chunked(inputs, labels, 4)
    assert loss.item() == 0.0
    assert all(bool((g == 0).all()) for g in torch.autograd.grad(loss, inputs))


def test_masked_rows_may_hold_anything() -> None:
    inputs, labels = _inputs(6, 4, 13), torch.tensor([1, -100, 2, 3, -100, 4])
    with torch.no_grad():
        inputs[0][labels == -100] = torch.nan
    loss = _chunked(inputs, labels, 2)
    gradients = torch.autograd.grad(loss, inputs)
    assert all(bool(t.isfinite().all()) for t in (loss, *gradients))


def test_grad_scale_acts_on_gradients_only() -> None:
    inputs, labels = _inputs(20, 6, 31), _labels(20, 31)
    plain, scaled = _chunked(inputs, labels, 8), _chunked(inputs, labels, 8, grad_scale=1024.0)
    assert plain.item() == scaled.item()
    for a, b in zip(torch.autograd.grad(plain, inputs), torch.autograd.grad(scaled, inputs), strict=True):
        assert torch.equal(a * 1024.0, b)


def test_scale_inside_saves_what_fp16_would_lose() -> None:
    """A word of probability 2^-26 has a gradient below fp16's smallest number; scaling after the product comes too late."""
    hidden, weight = torch.ones(4, 8, dtype=torch.float16), torch.zeros(6, 8, dtype=torch.float16, requires_grad=True)
    bias = torch.tensor([0, -18, -18, -18, -18, -18], dtype=torch.float16)
    labels = torch.zeros(4, dtype=torch.long)
    late = torch.autograd.grad(chunked_cross_entropy(hidden, weight, labels, 4, bias), weight)[0] * 65536.0
    early = torch.autograd.grad(chunked_cross_entropy(hidden, weight, labels, 4, bias, 65536.0), weight)[0]
    assert bool((late[1:] == 0).all())
    torch.testing.assert_close(early[1:], torch.full((5, 8), 4 * 65536 * 1.523e-8).half(), rtol=2e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradient_of_the_weight_is_summed_wide(dtype: torch.dtype) -> None:
    inputs, labels = _inputs(256, 8, 5, dtype), _labels(256, 5, masked=0.0)
    one, many = (torch.autograd.grad(_chunked(inputs, labels, chunk), inputs[1])[0] for chunk in (256, 1))
    wide = [t.detach().double().requires_grad_() for t in inputs]
    exact = torch.autograd.grad(_reference(wide, labels), wide[1])[0]
    for gradient in (one, many):  # summed in the narrow format, 256 additions would lose several bits
        assert gradient.dtype == dtype
        assert ((gradient.double() - exact).norm() / exact.norm()).item() < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("dtype", "result"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2]
)
def test_result_is_wide(dtype: torch.dtype, result: torch.dtype) -> None:
    assert _chunked(_inputs(3, 4, 5, dtype), _labels(3, 5), 2).dtype == result


def test_repeats_bit_for_bit() -> None:
    inputs, labels = _inputs(50, 16, 97, torch.float32), _labels(50, 97)
    first, second = (torch.autograd.grad(_chunked(inputs, labels, 7), inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_only_wanted_gradients_are_made() -> None:
    inputs, labels = _inputs(12, 4, 13), _labels(12, 13)
    inputs[1].requires_grad_(False)
    with _Largest() as seen:
        _chunked(inputs, labels, 1).backward()
    assert inputs[1].grad is None and inputs[0].grad is not None
    assert seen.numel < 13 * 4  # nothing of the weight's size
    with torch.no_grad():
        loss = _chunked(inputs, labels, 1)
    assert not loss.requires_grad


def test_second_backward_is_refused() -> None:
    inputs, labels = _inputs(3, 4, 5), _labels(3, 5)
    loss = _chunked(inputs, labels, 2)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call it again for a second backward"):
        loss.backward()


class _Largest(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.numel = max(self.numel, tensor.numel())
        return result


def test_M06_no_tensor_of_all_logits() -> None:
    """152,064 words, 4,096 tokens: all logits would be 622 M numbers."""
    hidden = torch.zeros(4096, 2, requires_grad=True)
    weight = torch.zeros(152_064, 2, requires_grad=True)
    labels = torch.full((4096,), -100)
    labels[::64] = 5
    with _Largest() as seen:
        loss = chunked_cross_entropy(hidden, weight, labels, 16)
        loss.backward()
    assert loss.item() == pytest.approx(64 * torch.tensor(152_064.0).log().item(), rel=1e-5)
    assert seen.numel == 16 * 152_064


def test_expression_for_the_compiler_is_the_same_function() -> None:
    logits = torch.randn(10, 37, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    labels, scale = _labels(10, 37, masked=0.0), torch.tensor(8.0, dtype=torch.float64)
    expected = _softmax_in_place(logits.clone(), labels, scale)
    torch.testing.assert_close(_softmax_masked(logits.clone(), labels, scale), expected, rtol=1e-12, atol=1e-14)
    loss, gradient = _softmax_masked(logits, labels.masked_fill(torch.arange(10) < 4, -100), scale)
    assert bool((gradient[:4] == 0).all())
    torch.testing.assert_close(gradient[4:], expected[1][4:], rtol=1e-12, atol=1e-14)
    assert loss < expected[0]
