"""What a streamed step is made of.

The model is a row of units: the embedding (unit 0), the blocks (1 … n) and the head with the final norm (n + 1). A unit's state
lives in host memory; on the card it passes through slots. Micro-batches are grouped in waves: all micro-batches of a wave go
through one unit before the next.

An op runs on one resource; a resource does its ops one after another, in the schedule's order. `after` names the ops, on any
resource, that must be complete before it starts. `reads` and `writes` name the buffers it touches, so that a checker can prove
that no op reads what is not written yet, or writes what is still to be read (schedule.check).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from pydantic import Field

from muletrain.spec.value import Value


class ScheduleError(Exception):
    """A schedule that cannot be built or that would read or overwrite what it must not. A fault of ours, never of a user's."""


Resource = Literal["compute", "update", "up", "down", "peers", "sums", "host"]
"""compute: the model. update: the optimizer's own stream. up, down: the link to and from the card. peers, sums: the same for
what waits for other workers of the box, so that nothing else stands behind it. host: the processor."""

Kind = Literal[
    "fetch",  # up: a unit's working parameters -> its slot
    "fetch_state",  # up: one piece of a unit's master, moments and gradient -> a staging buffer (in_backward: neither the
    # gradient nor what of the master is in the slot already)
    "fetch_gradient",  # up: a unit's gradient of the waves before -> its gradient buffer
    "update",  # update: one piece: optimizer step in staging, new working parameters -> slot
    "publish",  # down: one piece: new master, moments and working parameters -> host
    "forward",  # compute: one micro-batch through one unit (prologue for unit 0)
    "send",  # down: what one micro-batch keeps of one unit -> host; piece 0: the unit's input, piece 1: its kept activations
    "receive",  # up: the same back
    "epilogue",  # compute: one micro-batch through the head: loss and its gradient
    "backward",  # compute: one micro-batch back through one unit
    "norm",  # compute: a unit's squared gradient norm, after its last micro-batch
    "store",  # down: a unit's summed gradient -> host
    "store_part",  # down: one worker's summed gradient of a unit -> its ring
    "fetch_part",  # peers: all workers' parts of one piece of gradient, and its sum of the waves before -> a parts buffer
    "sum",  # update: a parts buffer -> their sum, and its squared norm after the last wave
    "store_sum",  # sums: one piece's sum -> host gradient
    "signal",  # down, peers, sums: tells the other workers that something is theirs to read, or to overwrite
    "wait",  # down, peers: until the other workers have told the same
    "decide",  # host: the one wait of a step: norm, finite, loss
]


Place = Literal[
    "slot",  # (kind, slot, piece): working parameters on the card
    "staging",  # (buffer,): one piece of optimizer state on the card
    "gradient",  # (kind, buffer): a unit's summed gradient on the card
    "input",  # (unit, position in wave), or with inputs on the host (unit mod 2, position in wave): a unit's input
    "kept",  # (unit, position in wave) if kept on the card, (buffer,) if offloaded: what backward needs beside the input
    "hidden_gradient",  # (position in wave,): the gradient that goes down through the units
    "card_state",  # (unit, piece): master and moments of a unit that stays on the card
    "host_parameters",  # (unit, piece): working copy in host memory
    "host_state",  # (unit, piece): master and moments in host memory
    "host_gradient",  # (unit,)
    "host_input",  # (unit, position in wave)
    "host_kept",  # (unit, position in wave)
    "sums",  # (): loss and squared norm; (unit, piece): a piece's squared norm, summed over workers
    "ring",  # (worker, slot): a worker's part of a unit's gradient, in host memory
    "parts",  # (buffer,): all workers' parts of a piece of gradient on the card, then their sum
    "flag",  # (phase, worker, unit): how far a worker is, in host memory
]


PHASES: Final = ("published", "stored", "taken", "summed")
"""What workers tell each other of a unit: its new parameters are in host memory; its part of the gradient is in the ring; the
parts in all rings are read; its summed gradient is in host memory."""


class Buffer(NamedTuple):
    """A piece of memory that ops hand over. A named tuple, because schedules compare and hash very many."""

    place: Place
    index: tuple[int, ...]  # type: ignore[assignment]  # shadows tuple.index, which nothing needs here


def index_in(buffers: tuple[Buffer, ...], place: Place) -> tuple[int, ...]:
    """Which of its kind is among `buffers`: the first one's index."""
    return next(buffer.index for buffer in buffers if buffer.place == place)


@dataclass(frozen=True, slots=True)
class Op:
    """One piece of work. Numbers that do not apply are -1. A plain dataclass: a schedule of 20,000 is built on every start."""

    id: int
    """Position in the schedule."""
    kind: Kind
    resource: Resource
    unit: int = -1
    wave: int = -1
    micro_batch: int = -1
    """Within the step, over all waves."""
    piece: int = -1
    size_bytes: int = 0
    """Moved over the link, for up and down."""
    flops: float = 0.0
    """Done, recomputation included, for compute."""
    memory_bytes: float = 0.0
    """Read and written in device memory, where that and not arithmetic takes the time (update, norm)."""
    after: tuple[int, ...] = ()
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()


Placement = Literal["streamed", "parameters", "card"]
"""Of a unit: everything travels; its parameters stay on the card and its state travels; everything stays on the card."""


class UnitShape(Value):
    """One unit's sizes, all that a schedule needs to know of it."""

    parameters: int
    trainable: bool
    kind: int
    """Units of one kind share slots."""
    pieces: tuple[int, ...]
    """Elements in each piece of its state, in order; their sum is `parameters`."""
    owners: tuple[int, ...] = ()
    """The worker that updates each piece; empty: worker 0 all of them."""
    forward_flops_a_token: float
    kept_bytes_a_token: int
    """Saved for backward without recomputation, beside the input."""


class StreamPlan(Value):
    """How a streamed step is laid out. Everything decided."""

    units: tuple[UnitShape, ...]
    hidden: int
    slots: int
    """A kind of unit."""
    staging: int
    """Buffers that pieces of optimizer state pass through."""
    waves: int
    working_bytes: int
    """A parameter, in the compute dtype."""
    state_up_bytes: float
    """A parameter, for an update: master, moments and gradient."""
    state_down_bytes: float
    """A parameter, after an update: master, moments and working copy."""
    gradient_bytes: int
    """A parameter, stored."""
    activations: tuple[Literal["recompute", "keep", "offload"], ...]
    """By unit, for the micro-batches of a wave."""
    inputs: Literal["card", "host"]
    """Where the blocks' inputs wait for backward."""
    update: Literal["next_fetch", "in_backward"]
    """next_fetch: a unit is updated when it is next fetched, when the global norm is known. in_backward: at once, without
    clipping or loss scale."""
    offload_every: int = Field(default=1, ge=1)
    """Offloading units send each so-many-th micro-batch of a step, from the first; the others they compute again."""
    working_in_master: bool = False
    """The working parameters are the master or half of it, so what is in a slot need not come again with the state."""
    recompute_factor: float = 1.0
    """Share of a unit's forward that recomputation repeats (the down projection is not)."""
    offload_buffers: int = Field(default=2, ge=1)
    """Micro-batches whose offloaded activations are on the card at once, on their way out or in."""
    placement: tuple[Placement, ...] = ()
    """By unit; empty: all are streamed."""
    workers: int = Field(default=1, ge=1)
    """Of one box, over one copy of the state in host memory."""
    worker: int = 0
    """Whose step this is."""
    ring: int = Field(default=3, ge=1)
    """Blocks whose gradients wait in a worker's ring to be summed."""

    @property
    def on_card_in_backward_bytes(self) -> int:
        """A parameter, of `state_up_bytes`: what an update in backward finds on the card."""
        return self.gradient_bytes + (self.working_bytes if self.working_in_master else 0)

    def policy(self, unit: int, micro_batch: int) -> Literal["recompute", "keep", "offload"]:
        """What `unit` does with what backward needs of a micro-batch."""
        policy = self.activations[unit]
        return "recompute" if policy == "offload" and micro_batch % self.offload_every else policy

    def placed(self, unit: int) -> Placement:
        """Where `unit` lives."""
        return self.placement[unit] if self.placement else "streamed"

    def owned(self, unit: int, worker: int) -> tuple[int, ...]:
        """The pieces of `unit` that `worker` updates."""
        shape = self.units[unit]
        if not shape.owners:
            return tuple(range(len(shape.pieces))) if worker == 0 else ()
        return tuple(piece for piece, owner in enumerate(shape.owners) if owner == worker)

    def of_kind(self, unit: int) -> tuple[int, int]:
        """(place of `unit` among the units of its kind, number of these units)."""
        same = [u for u, shape in enumerate(self.units) if shape.kind == self.units[unit].kind]
        return same.index(unit), len(same)


class StepShape(Value):
    """One step's work."""

    micro_batches: tuple[int, ...]
    """Positions in each, in order; dealt to waves as evenly as they go."""
    sequence_length: int
    pending: bool
    """Updates of the step before are still to be applied."""
    mode: Literal["train", "evaluate", "flush"]


class Schedule(Value):
    """Ops in issue order."""

    plan: StreamPlan
    step: StepShape
    ops: tuple[Op, ...]
