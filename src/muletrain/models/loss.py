"""Cross entropy of a linear head, chunk by chunk, so that all logits never exist at once.

The logits of 4,096 tokens over 152,000 words take 2.5 GB in fp32, their gradient as much again: more than many a model
beside them. Here a chunk of rows is multiplied with the head, its softmax is turned into its gradient in place, both
products of the backward pass are taken at once, and the chunk's memory is used again for the next. That makes three matrix
products in all, as many as without chunks: the backward pass only hands out what forward has already computed.
Rejected: recomputing each chunk in backward under activation checkpointing (a fourth product), and a kernel that also fuses
the products (loses to cuBLAS at these shapes and must be rewritten for each card).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

IGNORE = -100


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, bias: Tensor | None = None, grad_scale: float = 1.0
) -> Tensor:
    """Sum over rows of -log softmax(hidden @ weight.T + bias)[label], rows labelled -100 left out.

    Shapes: hidden [N, H], weight [V, H], labels [N] int64, bias [V]; at most `chunk` x V logits exist at a time. Returns a
    scalar in fp32 (fp64 for fp64 inputs), exactly 0 where nothing is labelled. Its gradients come multiplied by `grad_scale`,
    which the value itself does not show: a loss scale must act before the products, as fp16 would lose the small entries of
    softmax minus one-hot otherwise. Gradients of the weight are summed over chunks in fp32 and rounded once to its dtype.
    The graph can be walked backward once.
    """
    inputs = (hidden, weight) if bias is None else (hidden, weight, bias)
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    return _ChunkedCrossEntropy.apply(hidden, weight, bias, labels, chunk, grad_scale, trains)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Gradients are made in forward and kept; backward multiplies them in place by the incoming gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        chunk: int,
        grad_scale: float,
        trains: bool,
    ) -> Tensor:
        wanted = tuple(trains and need for need in ctx.needs_input_grad[:3])
        rows = None
        if not hidden.is_cuda:  # on a GPU, counting the labelled rows would make the host wait
            rows = (labels != IGNORE).nonzero().squeeze(1)
        picked = (hidden, labels) if rows is None else (hidden[rows], labels[rows])
        loss, grad_hidden, grad_weight, grad_bias = _loss_and_gradients(*picked, weight, bias, chunk, grad_scale, wanted)
        if grad_hidden is not None and rows is not None:
            grad_hidden = torch.zeros_like(hidden).index_copy_(0, rows, grad_hidden)
        ctx.gradients = (grad_hidden, grad_weight, grad_bias)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the chunked loss holds its gradients once; call it again for a second backward")
        gradients, ctx.gradients = ctx.gradients, None
        return (*(None if g is None else g.mul_(grad_output.to(g.dtype)) for g in gradients), None, None, None, None)


def _loss_and_gradients(
    hidden: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chunk: int,
    grad_scale: float,
    wanted: tuple[bool, ...],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    loss = torch.zeros((), dtype=wide, device=hidden.device)
    scale = torch.full((), grad_scale, dtype=wide, device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if wanted[0] else None
    grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if wanted[1] else None
    grad_bias = torch.zeros(bias.shape, dtype=wide, device=weight.device) if wanted[2] and bias is not None else None
    pointwise = _fused_on_gpu() if hidden.is_cuda else _softmax_in_place
    for start in range(0, hidden.shape[0], chunk):
        h = hidden[start : start + chunk]
        logits = h @ weight.t() if bias is None else torch.addmm(bias, h, weight.t())
        part, d_logits = pointwise(logits, labels[start : start + chunk], scale)
        del logits
        loss += part
        if grad_hidden is not None:
            torch.mm(d_logits, weight, out=grad_hidden[start : start + chunk])
        if grad_weight is not None:
            _add_product(grad_weight, d_logits.t(), h)
        if grad_bias is not None:
            grad_bias += d_logits.sum(0, dtype=wide)
        del d_logits  # before the next chunk's logits are made
    return (
        loss,
        grad_hidden,
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where total may be wider than the factors."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _softmax_in_place(logits: Tensor, labels: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of losses, scale x gradient of the logits), in the logits' own memory where they are wide enough."""
    x = logits.to(scale.dtype)
    x.sub_(x.amax(1, keepdim=True))
    target = labels.unsqueeze(1)
    at_target = x.gather(1, target)
    total = x.exp_().sum(1, keepdim=True)
    loss = (total.log() - at_target).sum()
    x.mul_(scale / total)
    x.scatter_add_(1, target, (-scale).expand_as(target))
    return loss, x.to(logits.dtype)


def _softmax_masked(logits: Tensor, labels: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The same as one expression for the compiler to fuse, with unlabelled rows masked; the gradient overwrites the logits."""
    labelled = (labels != IGNORE).unsqueeze(1)
    target = labels.unsqueeze(1)
    x = logits.to(scale.dtype)
    x = x - x.amax(1, keepdim=True)
    exponentials = x.exp()
    total = exponentials.sum(1, keepdim=True)
    hit = torch.arange(x.shape[1], device=x.device).unsqueeze(0) == target
    at_target = x.gather(1, target.clamp(min=0))
    loss = torch.where(labelled, total.log() - at_target, 0.0).sum()
    gradient = torch.where(labelled, (exponentials / total - hit.to(x.dtype)) * scale, 0.0)
    logits.copy_(gradient)
    return loss, logits


@lru_cache(maxsize=1)
def _fused_on_gpu() -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Unfused, the passes over [chunk, V] cost as much as the products."""
    return torch.compile(_softmax_masked, dynamic=None)  # type: ignore[no-any-return]
