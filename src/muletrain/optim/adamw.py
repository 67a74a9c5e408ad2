"""AdamW (Loshchilov & Hutter 2019) as one pure element-wise function, the same under every strategy.

Why not torch.optim: the streamed strategy updates flat slices whose state lives elsewhere, and the promise is that it gives
the very bits that the resident one does. Each element goes through separately rounded operations here, so a result depends
neither on how a tensor was cut nor on where an element fell in a vector register. On a GPU the function is compiled into one
kernel that reads and writes each array once. Everything that changes from step to step is a device scalar, so the host never
waits for the gradient norm before it enqueues the updates; a step that must not happen writes the old values back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from muletrain.spec.recipe import OptimizerSection


@dataclass
class ParameterState:
    """What an update of one parameter (or of a flat slice) touches. All tensors share one shape and device."""

    name: str
    master: Tensor
    """The fp32 (fp64) weights that training changes."""
    exp_avg: Tensor
    exp_avg_sq: Tensor
    working: Tensor | None
    """The bf16/fp16 copy that the model computes with; None where the model computes with `master` itself."""
    decay: bool


@dataclass(frozen=True)
class UpdateScalars:
    """The changing numbers of one update, as 0-dimensional tensors beside the parameters."""

    gradient_scale: Tensor
    """Multiplies the summed gradient: clip coefficient / (trained tokens x loss scale)."""
    step_size: Tensor
    """learning rate / (1 - beta1^t)."""
    inverse_bias2: Tensor
    """1 / sqrt(1 - beta2^t)."""
    keep: Tensor
    """1 - learning rate x weight decay."""
    one: Tensor
    apply: Tensor
    """bool: False leaves everything as it is."""


def update_scalars(
    section: OptimizerSection, learning_rate: float, update: int, gradient_scale: Tensor, apply: Tensor
) -> UpdateScalars:
    """Scalars for the update that follows `update` applied ones; dtype and device are `gradient_scale`'s."""
    t = update + 1
    host = torch.tensor(
        [
            learning_rate / (1.0 - section.beta1**t),
            1.0 / math.sqrt(1.0 - section.beta2**t),
            1.0 - learning_rate * section.weight_decay,
            1.0,
        ],
        dtype=torch.float64,
    )
    if gradient_scale.is_cuda:
        host = host.pin_memory()
    values = host.to(gradient_scale.device, gradient_scale.dtype, non_blocking=True)
    return UpdateScalars(gradient_scale, values[0], values[1], values[2], values[3], apply)


def new_values(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient_scale: Tensor,
    step_size: Tensor,
    inverse_bias2: Tensor,
    keep: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(master, exp_avg, exp_avg_sq) after the update; pure. The one place where AdamW's arithmetic is written."""
    grad = grad.to(master.dtype) * gradient_scale
    exp_avg = exp_avg * beta1 + grad * (1.0 - beta1)
    exp_avg_sq = exp_avg_sq * beta2 + (grad * grad) * (1.0 - beta2)
    direction = exp_avg / (exp_avg_sq.sqrt() * inverse_bias2 + epsilon)
    return master * keep - direction * step_size, exp_avg, exp_avg_sq


def _update_with_working(
    working: Tensor, apply: Tensor, master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *rest: Tensor | float
) -> None:
    new = new_values(master, grad, exp_avg, exp_avg_sq, *rest)  # type: ignore[arg-type]
    chosen = torch.where(apply, new[0], master)
    master.copy_(chosen)
    working.copy_(chosen)
    exp_avg.copy_(torch.where(apply, new[1], exp_avg))
    exp_avg_sq.copy_(torch.where(apply, new[2], exp_avg_sq))


def _update(apply: Tensor, master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *rest: Tensor | float) -> None:
    new = new_values(master, grad, exp_avg, exp_avg_sq, *rest)  # type: ignore[arg-type]
    master.copy_(torch.where(apply, new[0], master))
    exp_avg.copy_(torch.where(apply, new[1], exp_avg))
    exp_avg_sq.copy_(torch.where(apply, new[2], exp_avg_sq))


@cache
def _compiled(with_working: bool) -> Callable[..., None]:
    return torch.compile(_update_with_working if with_working else _update, dynamic=True)  # type: ignore[return-value]


@torch.no_grad()
def adamw_update(
    states: Sequence[ParameterState], grads: Sequence[Tensor], scalars: UpdateScalars, section: OptimizerSection
) -> None:
    """Updates every state in place from its gradient (any float dtype, the summed and still scaled one)."""
    on_gpu = bool(states) and states[0].master.is_cuda
    if not on_gpu and not bool(scalars.apply):
        return
    for state, grad in zip(states, grads, strict=True):
        keep = scalars.keep if state.decay else scalars.one
        rest = (scalars.gradient_scale, scalars.step_size, scalars.inverse_bias2, keep)
        rest += (section.beta1, section.beta2, section.epsilon)  # type: ignore[assignment]
        if not on_gpu:
            new = new_values(state.master, grad, state.exp_avg, state.exp_avg_sq, *rest)
            state.master.copy_(new[0])
            state.exp_avg.copy_(new[1])
            state.exp_avg_sq.copy_(new[2])
            if state.working is not None:
                state.working.copy_(new[0])
            continue
        arrays = tuple(t.reshape(-1) for t in (state.master, grad, state.exp_avg, state.exp_avg_sq))
        if state.working is None:
            _compiled(False)(scalars.apply, *arrays, *rest)
        else:
            _compiled(True)(state.working.view(-1), scalars.apply, *arrays, *rest)


def decayed(parameter: Tensor) -> bool:
    """Matrices and embeddings are decayed; parameters of one dimension (norms, biases) are not."""
    return parameter.dim() >= 2
