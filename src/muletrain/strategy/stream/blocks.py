"""A block's flat arrays in host memory, and the slots on the device that blocks are run in.

A slot is a module whose parameters are views of one flat buffer, so that loading a block is one large copy. Blocks of one kind
(same code, same sizes, same settings) share K slots; block i always uses slot i mod K of its kind, in forward and in backward,
so that the graph of a forward finds its parameters again in backward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from muletrain.models.build import materialize_buffers
from muletrain.models.weights import WeightSource
from muletrain.optim.adamw import ParameterState, decayed
from muletrain.precision.policy import Precision

SLOTS = 2
"""Slots a kind of block: one computes while the next is filled."""


@dataclass(frozen=True)
class Segment:
    """A parameter's place in its block's flat arrays."""

    name: str
    """Within the block."""
    shape: torch.Size
    start: int
    decay: bool

    def of(self, flat: Tensor) -> Tensor:
        """This parameter in a flat array of its block."""
        return flat[self.start : self.start + self.shape.numel()].view(self.shape)


def segments_of(block: nn.Module) -> list[Segment]:
    """The block's parameters laid out one after another, in model order."""
    segments, start = [], 0
    for name, parameter in block.named_parameters():
        segments.append(Segment(name, parameter.shape, start, decayed(parameter)))
        start += parameter.numel()
    return segments


def kind_of(block: nn.Module) -> str:
    """Blocks of equal kind can run in one slot: same modules, sizes and settings, whatever their number."""
    lines = []
    for name, module in block.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (str, int, float, tuple)) and not key.startswith("_") and key != "layer_idx"
        }
        sizes = [(key, tuple(p.shape)) for key, p in module.named_parameters(recurse=False)]
        lines.append(f"{name}:{type(module).__qualname__}:{sorted(settings.items())}:{sizes}")
    return "\n".join(lines)


class HostBlock:
    """One block's training state: flat master weights, working copy, gradient and moments, in host memory."""

    def __init__(self, prefix: str, block: nn.Module, precision: Precision) -> None:
        self.segments = segments_of(block)
        self.prefix, self.kind = prefix, kind_of(block)
        size = sum(segment.shape.numel() for segment in self.segments)
        self.master, self.gradient, self.exp_avg, self.exp_avg_sq = (
            torch.zeros(size, dtype=precision.master) for _ in range(4)
        )
        self.working = torch.zeros(size, dtype=precision.compute) if precision.split else self.master
        self._split = precision.split

    @torch.no_grad()
    def fill(self, weights: WeightSource) -> None:
        """First values, one tensor at a time."""
        for segment in self.segments:
            segment.of(self.master).copy_(weights.tensor(self.prefix + segment.name))
        self.working.copy_(self.master)

    def states(self) -> list[ParameterState]:
        """One state a parameter, views of the flat arrays."""
        return [
            ParameterState(
                self.prefix + segment.name,
                segment.of(self.master),
                segment.of(self.exp_avg),
                segment.of(self.exp_avg_sq),
                segment.of(self.working) if self._split else None,
                segment.decay,
            )
            for segment in self.segments
        ]

    def gradients(self) -> list[Tensor]:
        """Summed gradients, one view a parameter."""
        return [segment.of(self.gradient) for segment in self.segments]


class Slot:
    """Room on the device for one block of a kind."""

    def __init__(
        self, block: nn.Module, device: torch.device, precision: Precision, prepare: Callable[[nn.Module], None]
    ) -> None:
        self.module = copy.deepcopy(block).to_empty(device=device)
        segments = segments_of(block)
        size = sum(segment.shape.numel() for segment in segments)
        self._flat = torch.empty(size, dtype=precision.compute, device=device)
        self.gradient = torch.zeros(size, dtype=precision.master, device=device)
        self.parameters: list[nn.Parameter] = []
        self._sums = [segment.of(self.gradient) for segment in segments]
        for segment in segments:
            owner, _, leaf = segment.name.rpartition(".")
            parameter = nn.Parameter(segment.of(self._flat))
            setattr(self.module.get_submodule(owner), leaf, parameter)
            self.parameters.append(parameter)
        materialize_buffers(self.module, device)
        prepare(self.module)
        self._holds: HostBlock | None = None

    @torch.no_grad()
    def fetch(self, block: HostBlock) -> None:
        """Loads a block's working weights, unless they are here already."""
        if self._holds is not block:
            self._flat.copy_(block.working)
            self._holds = block

    def release(self) -> None:
        """What the slot holds is out of date: the next fetch copies."""
        self._holds = None

    @torch.no_grad()
    def add(self, grads: tuple[Tensor, ...], first: bool) -> None:
        """Adds one micro-batch's gradients, in master precision."""
        for total, grad in zip(self._sums, grads, strict=True):
            if first:
                total.copy_(grad)
            else:
                total.add_(grad)

    @torch.no_grad()
    def store(self, block: HostBlock) -> None:
        """Sends the summed gradient home."""
        block.gradient.copy_(self.gradient)
