"""What a streamed run holds on the device, all of it allocated once, and the ops that move things there and back.

A slot is room for one unit's working weights: a flat buffer that a module's parameters are views of. Units of one kind share
slots, and a unit always uses the same one, so that the graph of a forward finds its parameters again in backward. Those views
carry version counters of their own (`.data`): autograd would take a refilled slot for a modified one, and the schedule, not
autograd, answers for what is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from muletrain.optim.adamw import UpdateScalars
from muletrain.optim.flat import FlatState, Piece, update_piece
from muletrain.optim.master import SplitMaster
from muletrain.optim.moments import BLOCK
from muletrain.schedule.layout import Layout
from muletrain.schedule.ops import Op, StreamPlan, index_in
from muletrain.spec.recipe import OptimizerSection
from muletrain.strategy.randomness import key
from muletrain.strategy.stream.adapter import CardAdapter
from muletrain.strategy.stream.offload import Offload
from muletrain.strategy.stream.unit import Formats, HostUnit, Take


@dataclass
class Slot:
    """Room for one unit of a kind."""

    flat: Tensor
    parameters: list[nn.Parameter]
    """What is trained here, in the layout's order: views of `flat`, or of `adapter` where the unit is frozen."""
    module: nn.Module | None
    """The block that computes here; None for the embedding and the head, which are the model's own modules."""
    adapter: Tensor | None = None
    """The block's part of an adapter."""
    kept: Callable[..., Any] | None = None
    """The same block, keeping what backward needs."""


@dataclass(frozen=True)
class Pending:
    """An update that no unit has had yet, or not all: the last step's, or with updates in backward this one's."""

    scalars: UpdateScalars
    update: int
    finite: Tensor | None = None
    """[units], bool: with updates in backward, whether all is finite up to a unit's gradient, so that it may be applied."""

    def of(self, unit: int) -> UpdateScalars:
        """What one unit is updated with."""
        return self.scalars if self.finite is None else replace(self.scalars, apply=self.finite[unit])


class Device:
    """Slots, staging, gradient sums and inputs of one worker, and its half of the host's arrays."""

    def __init__(
        self,
        plan: StreamPlan,
        units: Sequence[HostUnit],
        slots: Sequence[Slot],
        formats: Formats,
        optimizer: OptimizerSection,
        seed: int,
        device: torch.device,
    ) -> None:
        self.plan, self.units, self.slots = plan, units, slots
        self.shared: list[nn.Parameter] = []
        """The embedding's weight, where the head computes with it."""
        self.pending: Pending | None = None
        self.adapter: CardAdapter | None = None
        """What is trained where the units are frozen."""
        self._formats, self._optimizer, self._seed, self.device = formats, optimizer, seed, device
        moved = [unit for number, unit in enumerate(units) if plan.units[number].trainable and not unit.on_card]
        most = max((piece.size for unit in moved for piece in unit.pieces), default=0)
        self._staging = [self._stage(most) for _ in range(plan.staging)]
        apart = formats.own_working and plan.workers > 1  # with one worker an update writes them straight into a slot
        working = [
            torch.zeros(most, dtype=formats.precision.compute, device=device) for _ in range(plan.staging if apart else 0)
        ]
        self._staged_working = working
        # A copy over the link that also changes the format would allocate the whole unit in the other format; each link
        # direction does it by pieces through a buffer of its own.
        self._narrow = {
            way: torch.zeros(
                max(most, BLOCK) if formats.gradient != formats.precision.master else 0, dtype=formats.gradient, device=device
            )
            for way in ("up", "down")
        }
        self._gradients: dict[tuple[int, ...], Tensor] = {}
        for number, (unit, buffer) in enumerate(zip(units, Layout(plan).gradients, strict=True)):
            if plan.units[number].trainable and buffer.index not in self._gradients:
                self._gradients[buffer.index] = torch.zeros(unit.layout.size, dtype=formats.precision.master, device=device)
        self.offload = Offload(plan.offload_buffers, device)
        self._inputs: list[Tensor] = []
        self._host_inputs: dict[int, Tensor] = {}

    def _stage(self, elements: int) -> tuple[FlatState, Tensor]:
        state = self._formats.state.allocate(elements, self.device)
        return state, torch.zeros(elements, dtype=self._formats.gradient, device=self.device)

    def place_inputs(self, elements: int, positions: int, take: Take) -> None:
        """Room for inputs that wait on the host: two units' on the device; there, those of all blocks but the last, which
        backward comes to before its input would be overwritten. `elements` a micro-batch."""
        dtype = self._formats.precision.compute
        self._inputs = [torch.zeros(positions, elements, dtype=dtype, device=self.device) for _ in range(2)]
        sent = range(1, len(self.units) - 2)
        self._host_inputs = {unit: take(positions * elements, dtype).view(positions, elements) for unit in sent}

    # --- parameters and state -------------------------------------------------------------------------------------

    @torch.no_grad()
    def fetch(self, op: Op) -> None:
        """A unit's working weights into its slot."""
        self.slots[op.unit].flat.copy_(self.units[op.unit].working, non_blocking=True)

    @torch.no_grad()
    def fetch_state(self, op: Op) -> None:
        """One piece of state, and of the gradient where it waited on the host."""
        unit = self.units[op.unit]
        piece = unit.pieces[op.piece]
        state, gradient = self._staging[index_in(op.writes, "staging")[0]]
        source = unit.state.part(piece.start, piece.stop).tensors()
        here_already = self._in_slot
        for there, here in list(zip(source, state.part(0, piece.size).tensors(), strict=True))[here_already:]:
            here.copy_(there, non_blocking=True)
        if self.plan.update == "next_fetch":
            gradient[: piece.size].copy_(unit.gradient[piece.start : piece.stop], non_blocking=True)

    @property
    def _in_slot(self) -> int:
        """How many of a piece's arrays an update in backward finds in its slot: the first, the working half of the master."""
        return int(self.plan.update == "in_backward" and self.plan.working_in_master)

    def _staged(self, buffer: int, slot: Tensor, piece: Piece) -> FlatState:
        """A staged piece, with the slot's own part of it where that is the state's."""
        state = self._staging[buffer][0].part(0, piece.size)
        if not self._in_slot:
            return state
        working = slot[piece.start : piece.stop]
        master = state.master
        return replace(state, master=SplitMaster(working, master.low) if isinstance(master, SplitMaster) else working)

    def update(self, op: Op) -> None:
        """The optimizer's step on one piece; its new working weights go to the slot."""
        unit = self.units[op.unit]
        piece = unit.pieces[op.piece]
        flat = self.slots[op.unit].flat
        on_card, in_backward = self.plan.placed(op.unit) == "card", self.plan.update == "in_backward"
        if on_card:
            state = unit.state.part(piece.start, piece.stop)
        else:
            buffer = index_in(op.writes, "staging")[0]
            state = self._staged(buffer, flat, piece)
        if on_card or in_backward:
            gradient = self.gradient(op)[piece.start : piece.stop]
        else:
            gradient = self._staging[buffer][1][: piece.size]
        # A slot that is itself part of the state needs no copy of it.
        slot = flat[piece.start : piece.stop] if self._formats.own_working or not (on_card or self._in_slot) else None
        if self.plan.workers > 1 and not on_card:
            slot = self._staged_working[buffer][: piece.size] if self._staged_working else None
        assert self.pending is not None
        for region in piece.regions:
            a, b = region.start - piece.start, region.stop - piece.start
            update_piece(
                state.part(a, b),
                gradient[a:b],
                self.pending.of(op.unit),
                self._optimizer,
                decay=region.decay,
                key=key(self._seed, self.pending.update, op.unit),
                start=region.start,
                working_out=None if slot is None else slot[a:b],
            )

    @torch.no_grad()
    def publish(self, op: Op) -> None:
        """One piece's new state, and working weights where they are kept apart, home."""
        unit = self.units[op.unit]
        piece = unit.pieces[op.piece]
        buffer = index_in(op.reads, "staging")[0]
        slot = self.slots[op.unit].flat
        state = self._staged(buffer, slot, piece)
        target = unit.state.part(piece.start, piece.stop).tensors()
        for here, there in zip(state.tensors(), target, strict=True):
            there.copy_(here, non_blocking=True)
        if self._formats.own_working:
            new = self._staged_working[buffer][: piece.size] if self._staged_working else slot[piece.start : piece.stop]
            unit.working[piece.start : piece.stop].copy_(new, non_blocking=True)

    @torch.no_grad()
    def place_adapter(self, unit: int) -> None:
        """A block's part of the adapter beside its weights, on the stream that computes: it is a copy within the device."""
        slot = self.slots[unit]
        if self.adapter is not None and slot.adapter is not None:
            slot.adapter.copy_(self.adapter.working(unit))

    # --- gradients --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def add_gradients(self, op: Op, grads: Sequence[Tensor]) -> None:
        """Adds one micro-batch's gradients, in the layout's order, in master precision, to the sum that the op reads."""
        if self.adapter is not None:
            self.adapter.add(op.unit, grads, first=op.micro_batch == 0)
            return
        first = not any(buffer.place == "gradient" for buffer in op.reads)
        flat = self._gradients[index_in(op.writes, "gradient")]
        for segment, grad in zip(self.units[op.unit].layout.segments, grads, strict=True):
            if first:
                segment.of(flat).copy_(grad)
            else:
                segment.of(flat).add_(grad)

    def gradient(self, op: Op) -> Tensor:
        """The gradient buffer that an op reads."""
        return self._gradients[index_in(op.reads, "gradient")]

    def gradient_views(self, op: Op) -> list[Tensor]:
        """A unit's summed gradients by parameter, in the layout's order."""
        flat = self.gradient(op)
        return [segment.of(flat) for segment in self.units[op.unit].layout.segments]

    @torch.no_grad()
    def store(self, op: Op) -> None:
        """A unit's summed gradient home."""
        self.gradient_home(self.units[op.unit].gradient, self.gradient(op))

    @torch.no_grad()
    def gradient_home(self, host: Tensor, card: Tensor) -> None:
        """A gradient on the card into `host`, in the host's format; on the down stream."""
        self._move(card, host, self._narrow["down"])

    @staticmethod
    def _move(source: Tensor, target: Tensor, room: Tensor) -> None:
        """Over the link; where the formats differ, in parts that change theirs on the card, in `room`."""
        if source.dtype == target.dtype:
            target.copy_(source, non_blocking=True)
            return
        for start in range(0, len(source), len(room)):
            part = source[start : start + len(room)]
            narrow = room[: len(part)]
            narrow.copy_(part, non_blocking=True)
            target[start : start + len(part)].copy_(narrow, non_blocking=True)

    @torch.no_grad()
    def fetch_gradient(self, op: Op) -> None:
        """The sum of the waves before, back."""
        card = self._gradients[index_in(op.writes, "gradient")]
        self._move(self.units[op.unit].gradient, card, self._narrow["up"])

    # --- inputs -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def keep_input(self, op: Op, output: Tensor) -> Tensor:
        """The next unit's input, where it will be found in backward; no graph, a version counter of its own."""
        if self.plan.inputs == "card":
            return output
        row, position = index_in(op.writes, "input")
        place = self._inputs[row][position, : output.numel()].view(output.shape)
        place.copy_(output)
        return place.data

    @torch.no_grad()
    def send(self, op: Op) -> None:
        """One micro-batch's input of a unit home."""
        if op.piece == 1:
            self.offload.send(op.unit, op.micro_batch, index_in(op.writes, "host_kept")[1])
            return
        row, position = index_in(op.reads, "input")
        unit, _ = index_in(op.writes, "host_input")
        self._host_inputs[unit][position].copy_(self._inputs[row][position], non_blocking=True)

    @torch.no_grad()
    def receive(self, op: Op) -> None:
        """The same back, to the very place it had."""
        if op.piece == 1:
            buffer = index_in(op.writes, "kept")[0]
            self.offload.receive(op.unit, op.micro_batch, index_in(op.reads, "host_kept")[1], buffer)
            return
        row, position = index_in(op.writes, "input")
        unit, _ = index_in(op.reads, "host_input")
        self._inputs[row][position].copy_(self._host_inputs[unit][position], non_blocking=True)
