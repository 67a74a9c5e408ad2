"""What a worker exchanges with the other workers of its box: its gradients, through a ring in shared host memory, and signals.

Each worker writes its part of a unit's gradient into its own ring; the owner of a piece fetches all workers' parts of it,
adds them in master precision in the order of workers, and writes the one sum. All parts go through the ring, the owner's
too, so that a sum does not depend on who made it. The schedule (schedule.workers) says when.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from muletrain.metrics.communication import CommunicationMeter
from muletrain.optim.flat import FlatLayout, Piece
from muletrain.optim.moments import BLOCK
from muletrain.schedule.layout import Layout
from muletrain.schedule.ops import Op, StreamPlan, index_in
from muletrain.schedule.workers import PARTS, ring_sizes, ring_slot
from muletrain.spec.plan import StreamingPlan
from muletrain.strategy.stream.arena import padded_bytes
from muletrain.strategy.stream.device import Device
from muletrain.strategy.stream.shared import Team, flag_count
from muletrain.strategy.stream.signals import HostSignals, Signals, StreamSignals
from muletrain.strategy.stream.unit import Formats, HostUnit, Take


def slice_units(plan: StreamPlan, units: Sequence[HostUnit], streaming: StreamingPlan, team: Team) -> StreamPlan:
    """Cuts the units into pieces that each have one owner, and names this worker in the plan."""
    slices, shapes = streaming.slices or (1,) * team.workers, []
    if len(slices) != team.workers:
        raise ValueError(f"the plan has slices for {len(slices)} workers, {team.workers} are here")
    for unit, shape in zip(units, plan.units, strict=True):
        unit.pieces, owners = cut(unit.layout, streaming.piece, slices)
        shapes.append(shape.model_copy(update={"pieces": tuple(piece.size for piece in unit.pieces), "owners": owners}))
    changes = {"units": tuple(shapes), "workers": team.workers, "worker": team.worker, "ring": streaming.ring}
    return plan.model_copy(update=changes)


def cut(layout: FlatLayout, most: int, slices: Sequence[int]) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
    """(pieces of at most `most` elements, the worker that owns each): worker w gets `slices[w]` of their sum, as near as blocks
    of 256 go."""
    blocks, total = layout.size // BLOCK, sum(slices)
    bounds = [blocks * share // total * BLOCK for share in accumulate(slices, initial=0)]
    pieces: list[Piece] = []
    owners: list[int] = []
    for worker, (start, stop) in enumerate(pairwise(bounds)):
        mine = list(layout.pieces(most, start, stop)) if stop > start else []
        pieces += mine
        owners += [worker] * len(mine)
    return tuple(pieces), tuple(owners)


def shared_bytes(
    named: Sequence[Sequence[tuple[str, Tensor]]], formats: Formats, streaming: StreamingPlan, workers: int
) -> int:
    """What several workers take of the arena beside the units' state: rings, flags, gradients of units on the card."""
    sizes = [FlatLayout.of(part).size for part in named]
    ring = sum(padded_bytes(size, formats.gradient) for size in ring_sizes(sizes, streaming.ring))
    stays = sum(padded_bytes(sizes[unit], formats.gradient) for unit in streaming.on_card)
    return workers * ring + stays + padded_bytes(flag_count(len(sizes), workers), torch.int32)


class Exchange:
    """Handlers of store_part, fetch_part, sum, store_sum, signal and wait."""

    def __init__(self, device: Device, team: Team, take: Take, meter: CommunicationMeter, formats: Formats) -> None:
        """Collective."""
        self._plan = plan = device.plan
        self._device, self.team, self._master = device, team, formats.precision.master
        sizes, where = [unit.parameters for unit in plan.units], device.device
        self._rings = [[take(size, formats.gradient) for size in ring_sizes(sizes, plan.ring)] for _ in range(plan.workers)]
        flags = take(flag_count(len(sizes), plan.workers), torch.int32)
        self._signals: Signals = StreamSignals(flags) if where.type == "cuda" else HostSignals(flags, team, meter)
        team.watch(flags)
        mine = [(u, p) for u, unit in enumerate(plan.units) if unit.trainable for p in plan.owned(u, plan.worker)]
        self._places = {piece: number for number, piece in enumerate(mine)}
        most = max((plan.units[u].pieces[p] for u, p in mine), default=0)
        rows = plan.workers + (plan.waves > 1)
        self._parts = [torch.zeros(rows, most, dtype=formats.gradient, device=where) for _ in range(PARTS)]
        self.norms = torch.zeros(max(1, len(mine)), dtype=torch.float64, device=where)
        """Of this worker's pieces of the summed gradient, in the latest step."""
        layout = Layout(plan)
        self._sharing = {u for u, buffer in enumerate(layout.gradients) if layout.sharers[buffer] > 1}
        """Units whose gradient buffer is not their own."""
        self._base = self._steps = 0
        """What all flags have reached."""

    def begin(self) -> None:
        """Before a schedule: its signals are beyond all earlier ones."""
        self._base, self._steps = self._steps, self._steps + self._plan.waves

    @torch.no_grad()
    def store_part(self, op: Op) -> None:
        """This worker's gradient of a unit into its ring."""
        gradient = self._device.gradient(op)
        self._device.gradient_home(self._ring(self._plan.worker, op)[: len(gradient)], gradient)

    def _ring(self, worker: int, op: Op) -> Tensor:
        return self._rings[worker][ring_slot(self._plan, op.unit)]

    def _rows(self, op: Op, buffer: int) -> Tensor:
        return self._parts[buffer][:, : self._plan.units[op.unit].pieces[op.piece]]

    @torch.no_grad()
    def fetch_part(self, op: Op) -> None:
        """All workers' parts of a piece, and in later waves the sum so far, as rows of a parts buffer."""
        unit, rows = self._device.units[op.unit], self._rows(op, index_in(op.writes, "parts")[0])
        piece = unit.pieces[op.piece]
        for worker in range(self._plan.workers):
            rows[worker].copy_(self._ring(worker, op)[piece.start : piece.stop], non_blocking=True)
        if self._accumulates(op):
            rows[-1].copy_(unit.gradient[piece.start : piece.stop], non_blocking=True)

    @torch.no_grad()
    def sum(self, op: Op) -> None:
        """The rows added up into the first; after the last wave their norm."""
        rows = self._rows(op, index_in(op.writes, "parts")[0])
        if self._accumulates(op):
            total = rows[-1].to(self._master, copy=True)
            parts = list(rows[:-1])
        else:
            total = rows[0].to(self._master, copy=True)
            parts = list(rows[1 : self._plan.workers])
        for part in parts:
            total.add_(part)
        if any(buffer.place == "sums" for buffer in op.writes):
            self.norms[self._places[op.unit, op.piece]] = _norm(total)
        rows[0].copy_(total)

    def _accumulates(self, op: Op) -> bool:
        """Whether fetch_part brought a sum of earlier waves: a shared gradient buffer is overwritten in each."""
        return op.wave > 0 and op.unit in self._sharing

    @torch.no_grad()
    def store_sum(self, op: Op) -> None:
        """The sum home."""
        unit, rows = self._device.units[op.unit], self._rows(op, index_in(op.reads, "parts")[0])
        piece = unit.pieces[op.piece]
        unit.gradient[piece.start : piece.stop].copy_(rows[0], non_blocking=True)

    def signal(self, op: Op) -> None:
        """Tells the others."""
        self._signals.write(self._flag(index_in(op.writes, "flag")), self._base + op.wave + 1)

    def wait(self, op: Op) -> None:
        """For the others."""
        for buffer in op.reads:
            if buffer.place == "flag":
                self._signals.wait(self._flag(buffer.index), self._base + op.wave + 1)

    def _flag(self, index: tuple[int, ...]) -> int:
        phase, worker, unit = index
        return (phase * self._plan.workers + worker) * len(self._plan.units) + unit


def _norm(total: Tensor) -> Tensor:
    if total.is_cuda:
        return torch._foreach_norm([total], 2)[0].double()
    return torch.linalg.vector_norm(total, dtype=torch.float64)
