"""Training beside a frozen model that streams: the model's weights are only fetched, what is trained stays on the device.

A frozen unit is one array of the compute dtype in host memory: no master, no gradient, no moments, and nothing ever goes back.
The adapter's matrices, of all blocks, are one unit whose whole state is on the device; they are so small that each block's part
is copied into its slot whenever the block computes. They are updated at the end of the step, when the global norm is known.

Several workers share the frozen weights in host memory, and each has the whole adapter. Its gradients meet in shared memory at
the end of a step, where every worker adds them up in the order of workers: all have the same bits, and no NCCL is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from muletrain.metrics.communication import CommunicationMeter
from muletrain.models.weights import WeightSource
from muletrain.optim.adamw import UpdateScalars
from muletrain.optim.flat import FlatLayout, Piece, Region, update_piece
from muletrain.spec.recipe import OptimizerSection
from muletrain.strategy.randomness import key
from muletrain.strategy.stream.arena import padded_bytes
from muletrain.strategy.stream.shared import Team
from muletrain.strategy.stream.unit import Formats, HostUnit, Take
from muletrain.strategy.update import square_norm

Named = Sequence[tuple[str, Tensor]]


class FrozenUnit:
    """A unit's weights, never trained: `working` [size] of the compute dtype. Has a HostUnit's face, without state."""

    def __init__(self, number: int, named: Named, dtype: torch.dtype, take: Take, on_card: bool) -> None:
        self.number, self.on_card, self.layout = number, on_card, FlatLayout.of(named)
        self.working = take(self.layout.size, dtype)
        self.pieces: tuple[Piece, ...] = (Piece((Region(0, self.layout.size, decay=False),)),)

    @torch.no_grad()
    def fill(self, weights: WeightSource) -> None:
        """Values, one tensor at a time."""
        for segment in self.layout.segments:
            segment.of(self.working).copy_(weights.tensor(segment.name))

    def refresh(self) -> None:
        """There is no master that the weights could have moved away from."""


def frozen_bytes(named: Named, dtype: torch.dtype, padded: Callable[[int, torch.dtype], int]) -> int:
    """What a frozen unit takes of an arena."""
    return padded(FlatLayout.of(named).size, dtype)


class CardAdapter:
    """All trained matrices of a model whose own weights are frozen, with masters, moments and gradient sums."""

    def __init__(
        self, blocks: Sequence[Named], formats: Formats, optimizer: OptimizerSection, seed: int, most: int, take: Take
    ):
        """`blocks`: the trained (name, parameter) pairs of each. `take` gives device memory; `most`: elements in a kernel."""
        named = [pair for block in blocks for pair in block]
        self.unit = HostUnit(len(blocks), named, formats, take, most, on_card=True)
        self._gradient = take(self.unit.layout.size, formats.precision.master)
        self._optimizer, self._seed, self._own_working = optimizer, seed, formats.own_working
        self._team: Team | None = None
        self.layouts = [FlatLayout.of(block) for block in blocks]
        self._starts = [0]
        for layout in self.layouts:
            self._starts.append(self._starts[-1] + layout.size)
        if self._starts[-1] != self.unit.layout.size or len(self.unit.layout.regions) > 1:
            raise ValueError("an adapter is made of matrices alone, so that a block's are neighbours in the flat arrays")

    def shared_bytes(self, workers: int) -> int:
        """What `share` takes of an arena."""
        return workers * padded_bytes(self._gradient.numel(), self._gradient.dtype)

    def share(self, team: Team, take: Take, meter: CommunicationMeter) -> None:
        """From now on gradients are summed over `team`, through host memory that `take` gives. Collective: returns when all
        workers have filled what they share."""
        self._team, self._meter = team, meter
        self._parts = [take(self._gradient.numel(), self._gradient.dtype) for _ in range(team.workers)]
        dist.barrier()

    def working(self, unit: int) -> Tensor:
        """The part of the adapter that belongs to `unit` (the first block is 1), as the model computes with it."""
        return self.unit.working[self._starts[unit - 1] : self._starts[unit]]

    @torch.no_grad()
    def add(self, unit: int, grads: Sequence[Tensor], first: bool) -> None:
        """Adds one micro-batch's gradients of a block, in its layout's order, in master precision."""
        if not grads:  # the head has none
            return
        flat = self._gradient[self._starts[unit - 1] : self._starts[unit]]
        for segment, grad in zip(self.layouts[unit - 1].segments, grads, strict=True):
            if first:
                segment.of(flat).copy_(grad)
            else:
                segment.of(flat).add_(grad)

    @torch.no_grad()
    def square_norm(self) -> Tensor:
        """This worker's share of the squared norm of the gradient summed over workers: all of it on the first. Collective."""
        if self._team is not None:
            self._add_up(self._team)
        squares = square_norm(list(self.unit.layout.views(self._gradient).values()))
        return squares if self._team is None or self._team.worker == 0 else torch.zeros_like(squares)

    def _add_up(self, team: Team) -> None:
        """What a worker wrote is overwritten a step later, when the decision in between has shown that all have read it."""
        self._parts[team.worker].copy_(self._gradient, non_blocking=True)
        if self._gradient.is_cuda:
            torch.cuda.current_stream(self._gradient.device).synchronize()
        with self._meter.wait():
            dist.barrier()
        room = torch.empty_like(self._gradient[: max(piece.size for piece in self.unit.pieces)])
        for piece in self.unit.pieces:
            total, part = self._gradient[piece.start : piece.stop], room[: piece.size]
            total.copy_(self._parts[0][piece.start : piece.stop], non_blocking=True)
            for other in self._parts[1:]:
                part.copy_(other[piece.start : piece.stop], non_blocking=True)
                total.add_(part)

    def update(self, scalars: UpdateScalars, update: int) -> None:
        """AdamW on all of it."""
        for region in (region for piece in self.unit.pieces for region in piece.regions):
            cut = slice(region.start, region.stop)
            update_piece(
                self.unit.state.part(region.start, region.stop),
                self._gradient[cut],
                scalars,
                self._optimizer,
                decay=region.decay,
                key=key(self._seed, update, self.unit.number),
                start=region.start,
                working_out=self.unit.working[cut] if self._own_working else None,
            )
