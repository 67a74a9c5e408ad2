"""A unit's training state in host memory. A unit is the embedding, a block, or the head with the final norm.

Its parameters lie one after another in flat arrays (optim.flat), so that loading a unit is one large copy and updating it a few
kernels, however many parameters it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from muletrain.models.weights import WeightSource
from muletrain.optim.flat import FlatLayout, FlatSegment, FlatState, Piece, StateFormat
from muletrain.optim.master import SplitMaster, join_master, split_master
from muletrain.optim.moments import BLOCK, Moment, MomentFormat
from muletrain.precision.policy import Precision

Take = Callable[[int, torch.dtype], Tensor]
"""(elements, dtype) -> a zeroed host array."""


@dataclass(frozen=True)
class Formats:
    """How a streamed run keeps its state."""

    precision: Precision
    state: StateFormat
    gradient: torch.dtype
    """Of a unit's summed gradient in host memory."""

    @property
    def own_working(self) -> bool:
        """The compute dtype is neither the master's nor bf16, so a working copy is kept beside the state (fp16)."""
        return self.state.split and self.precision.compute != torch.bfloat16


class HostUnit:
    """Master weights, moments, summed gradient and, where they are not part of the master, working weights, in flat arrays."""

    def __init__(
        self,
        number: int,
        named: Sequence[tuple[str, Tensor]],
        formats: Formats,
        take: Take,
        most: int,
        on_card: bool = False,
        stored: bool = True,
    ) -> None:
        """`named`: canonical names and parameters (the meta device will do). `most`: elements in a piece of state.

        `on_card`: `take` gives device memory, and the gradient stays where it is summed. `stored`: gradients go to the host.
        """
        self.number, self.on_card, self.layout, self._formats = number, on_card, FlatLayout.of(named), formats
        if on_card:
            most = max(most, self.layout.size)  # nothing of it is staged: one update for all that is decayed alike
        self.pieces: tuple[Piece, ...] = tuple(self.layout.pieces(most)) if self.layout.size else ()
        size = self.layout.size
        self.state = _state(formats.state, size, take)
        self.gradient = take(size if stored and not on_card else 0, formats.gradient)
        master = self.state.master
        self.working: Tensor
        """What the model computes with: [size] of the compute dtype."""
        if formats.own_working:
            self.working = take(size, formats.precision.compute)
        else:
            self.working = master.hi if isinstance(master, SplitMaster) else master

    @torch.no_grad()
    def fill(self, weights: WeightSource) -> None:
        """First values, one tensor at a time."""
        for segment in self.layout.segments:
            value = weights.tensor(segment.name)
            self.set_master(segment.name, value.to(self.working.device, self._formats.precision.master))
        self.refresh()

    @torch.no_grad()
    def set_master(self, name: str, value: Tensor) -> None:
        """Overwrites one parameter's master. `refresh` must follow."""
        segment = self.segment(name)
        master = self.state.master
        if isinstance(master, SplitMaster):
            split_master(value, SplitMaster(segment.of(master.hi), segment.of(master.low)))
        else:
            segment.of(master).copy_(value)

    @torch.no_grad()
    def refresh(self) -> None:
        """The working weights afresh from the masters, where they are kept apart."""
        master = self.state.master
        if self._formats.own_working and isinstance(master, SplitMaster):
            self.working.copy_(join_master(master.hi, master.low))

    def segment(self, name: str) -> FlatSegment:
        """A parameter's place."""
        return next(segment for segment in self.layout.segments if segment.name == name)


def _state(format: StateFormat, size: int, take: Take) -> FlatState:
    def moment(of: MomentFormat) -> Moment:
        return Moment(take(size, of.dtype), take(size // BLOCK, torch.float32) if of.kind == "8bit" else None)

    master: Tensor | SplitMaster = take(size, format.first.full) if not format.split else _pair(size, take)
    return FlatState(format, master, moment(format.first), moment(format.second))


def _pair(size: int, take: Take) -> SplitMaster:
    return SplitMaster(take(size, torch.bfloat16), take(size, torch.int16))


def unit_bytes(
    named: Sequence[tuple[str, Tensor]], formats: Formats, padded: Callable[[int, torch.dtype], int], stored: bool
) -> int:
    """What a unit takes of an arena: the same requests as HostUnit makes, only counted."""
    total = 0

    def count(elements: int, dtype: torch.dtype) -> Tensor:
        nonlocal total
        total += padded(elements, dtype)
        return torch.empty(elements, dtype=dtype, device="meta")

    HostUnit(0, named, formats, count, BLOCK * 1024, stored=stored)
    return total


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
