"""Gradient sums of the resident strategy: flat master-precision arrays, one a block, that parameters' gradients are views of.

Micro-batches add into them (always in master precision, also where the model computes in bf16 or fp16), and plain data parallel
sums them over workers: a block's array is reduced as soon as the last micro-batch's backward has left the block, while earlier
blocks still compute, and never before the last micro-batch. Rejected: DDP, whose buckets are in the parameters' dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muletrain.metrics.communication import CommunicationMeter


class GradientSums:
    """`groups` are lists of parameters, each summed in one flat array; `grads` gives a parameter's view of it."""

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]], dtype: torch.dtype, workers: int, meter: CommunicationMeter):
        self.grads: dict[nn.Parameter, Tensor] = {}
        self._workers, self._meter = workers, meter
        self._flats: list[Tensor] = []
        self._missing: list[int] = []
        self._group_of: dict[nn.Parameter, int] = {}
        self._sizes = [len(group) for group in groups]
        self._works: list[Any] = []
        self._reduce = False
        for number, group in enumerate(groups):
            flat = torch.zeros(sum(p.numel() for p in group), dtype=dtype, device=group[0].device)
            self._flats.append(flat)
            start = 0
            for parameter in group:
                self.grads[parameter] = flat[start : start + parameter.numel()].view(parameter.shape)
                start += parameter.numel()
                self._group_of[parameter] = number
                parameter.register_post_accumulate_grad_hook(self._added)
        self.zero()

    def zero(self) -> None:
        """Forgets all sums, for the next step."""
        torch._foreach_zero_(self._flats)
        for parameter, grad in self.grads.items():
            parameter.grad = grad if grad.dtype == parameter.dtype else None

    def begin(self, last: bool) -> None:
        """A micro-batch's backward is about to run; the last one of a step sends each block's sum on its way."""
        self._reduce = last and self._workers > 1
        self._missing = list(self._sizes)

    def finish(self) -> None:
        """Waits for the sums over workers that are still on their way. Parameters that got no gradient count as zero."""
        if self._reduce:
            for number, missing in enumerate(self._missing):
                if missing > 0:
                    self._send(number)
        for work in self._works:
            with self._meter.wait():
                work.wait()
        self._works = []

    def _added(self, parameter: nn.Parameter) -> None:
        total = self.grads[parameter]
        if parameter.grad is not None and parameter.grad is not total:
            total.add_(parameter.grad)
            parameter.grad = total if total.dtype == parameter.dtype else None
        number = self._group_of[parameter]
        self._missing[number] -= 1
        if self._reduce and self._missing[number] == 0:
            self._send(number)

    def _send(self, number: int) -> None:
        self._works.append(dist.all_reduce(self._flats[number], async_op=True))
