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

from muletrain.optim.master import as_bits, round_master
from muletrain.spec.recipe import OptimizerSection

CPU_CHUNK = 2**16
"""Elements updated at a time on a CPU: intermediate results stay in the cache. Ten times as fast as whole large arrays."""


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


def _update(
    working: Tensor | None,
    apply: Tensor,
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    numbers: tuple[Tensor, Tensor, Tensor, Tensor],
    betas: tuple[float, float, float],
) -> None:
    new = new_values(master, grad, exp_avg, exp_avg_sq, *numbers, *betas)
    for old, fresh in zip((master, exp_avg, exp_avg_sq), new, strict=True):
        old.copy_(torch.where(apply, fresh, old))
    if working is not None:
        round_master(master, working)


@cache
def _compiled() -> Callable[..., None]:
    return torch.compile(_update, dynamic=True)


@torch.no_grad()
def adamw_update(
    states: Sequence[ParameterState], grads: Sequence[Tensor], scalars: UpdateScalars, section: OptimizerSection
) -> None:
    """Updates every state in place from its gradient (any float dtype, the summed and still scaled one)."""
    on_gpu = bool(states) and states[0].master.is_cuda
    update = _compiled() if on_gpu else _update
    betas = (section.beta1, section.beta2, section.epsilon)
    for state, grad in zip(states, grads, strict=True):
        keep = scalars.keep if state.decay else scalars.one
        numbers = (scalars.gradient_scale, scalars.step_size, scalars.inverse_bias2, keep)
        arrays = [t.view(-1) for t in (state.master, grad.contiguous(), state.exp_avg, state.exp_avg_sq)]
        working = None if state.working is None else as_bits(state.working.view(-1))
        step = max(1, grad.numel()) if on_gpu else CPU_CHUNK
        for first in range(0, grad.numel(), step):
            part = slice(first, first + step)
            update(None if working is None else working[part], scalars.apply, *(t[part] for t in arrays), numbers, betas)


def decayed(parameter: Tensor) -> bool:
    """Matrices and embeddings are decayed; parameters of one dimension (norms, biases) are not."""
    return parameter.dim() >= 2
