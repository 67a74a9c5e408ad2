"""The end of a step, the same under every strategy: global sums, one decision for all, the updates, one read by the host.

Losses and gradients are summed over tokens, never averaged, until here; the division by the step's tokens is part of the one
factor that multiplies gradients inside the update. So no mean of means can arise from micro-batches or workers of unequal size.
The decision (clip, skip) is made on the device; the host reads the step's numbers once, after the updates are enqueued.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from muletrain.metrics.communication import CommunicationMeter
from muletrain.optim.adamw import ParameterState, UpdateScalars, adamw_update, update_scalars
from muletrain.precision.scaler import LossScaler
from muletrain.spec.recipe import OptimizerSection
from muletrain.strategy.contract import NonFiniteError, StepContext, StepResult


def square_norm(grads: Sequence[Tensor]) -> Tensor:
    """Sum of squares over all tensors, float64, on their device. The order is that of `grads`."""
    if not grads:
        return torch.zeros((), dtype=torch.float64)
    if grads[0].is_cuda:
        norms = torch._foreach_norm(list(grads), 2)
        return torch.stack(norms).double().square().sum()
    return torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]).square().sum()


@dataclass(frozen=True)
class Decision:
    """What the whole group agreed on, still on the device."""

    sums: Tensor
    """[loss sum, tokens, norm], float64."""
    scalars: UpdateScalars


class Updater:
    """Decides and applies updates. One a worker; `workers` > 1 means that a process group exists."""

    def __init__(
        self,
        optimizer: OptimizerSection,
        clip_norm: float,
        scaler: LossScaler,
        master: torch.dtype,
        workers: int,
        meter: CommunicationMeter,
        on_host: bool = False,
    ) -> None:
        """`on_host`: sums over workers go through the host whatever the device, as there is no NCCL."""
        self.optimizer, self.scaler, self._on_host = optimizer, scaler, on_host
        self._clip_norm, self._master, self._workers, self._meter = clip_norm, master, workers, meter

    def total(self, values: Tensor) -> Tensor:
        """Sum over workers, in place."""
        if self._workers > 1:
            shared = values.cpu() if self._on_host else values
            with self._meter.wait():
                dist.all_reduce(shared)
            if shared is not values:
                values.copy_(shared)
        return values

    @torch.no_grad()
    def decide(self, loss_sum: Tensor, tokens: int, squares: Tensor, context: StepContext) -> Decision:
        """Takes this worker's share of each sum (squares of the summed, still scaled gradient); collective."""
        count = torch.tensor(float(tokens), dtype=torch.float64, device=loss_sum.device)
        sums = self.total(torch.stack([loss_sum.double(), count, squares.to(loss_sum.device)]))
        divisor = sums[1] * self.scaler.factor
        norm = sums[2].sqrt() / divisor
        clip = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0) if self._clip_norm else torch.ones_like(norm)
        apply = torch.isfinite(norm) & torch.isfinite(sums[0])
        scale = (clip / divisor).to(self._master)
        scalars = update_scalars(self.optimizer, context.learning_rate, context.update, scale, apply)
        return Decision(torch.stack([sums[0], sums[1], norm]), scalars)

    @torch.no_grad()
    def unclipped(self, tokens: int, context: StepContext, device: torch.device) -> UpdateScalars:
        """What updates before the norm is known go by: no clip and no loss scale. `apply` is whether there is a token."""
        count = torch.tensor(float(tokens), dtype=torch.float64, device=device)
        scale = (torch.ones_like(count) / count).to(self._master)
        return update_scalars(self.optimizer, context.learning_rate, context.update, scale, count > 0)

    def apply(self, states: Sequence[ParameterState], grads: Sequence[Tensor], decision: Decision) -> None:
        """Updates parameters and their state, or leaves them as they are if the decision says so."""
        adamw_update(states, grads, decision.scalars, self.optimizer)

    def result(self, decision: Decision, parts_s: Callable[[], dict[str, float]]) -> StepResult:
        """Reads the step's numbers (the one host wait of a step) and moves the loss scale.

        Raises NonFiniteError where a value is not finite and no loss scale explains it; nothing was updated then.
        """
        loss_sum, tokens, norm = decision.sums.tolist()
        scale = self.scaler.scale
        if tokens == 0:
            return StepResult(0.0, 0, 0.0, True, scale, parts_s())
        finite = math.isfinite(loss_sum) and math.isfinite(norm)
        if not finite and not self.scaler.enabled:
            raise NonFiniteError(f"loss sum {loss_sum}, gradient norm {norm}: not finite")
        self.scaler.update(finite)
        return StepResult(loss_sum, int(tokens), norm, not finite, scale, parts_s())
