"""What a streamed step does because other workers of the box do the same step over the same host memory.

Parameters, state and the summed gradient exist once. Each unit's flat arrays are cut into pieces, and each piece has one
owner. The owner adds up all workers' parts of its gradient, updates it, and publishes new parameters; everybody reads them:

  backward      store_part -> own ring, signal stored | wait stored, fetch_part, sum, store_sum (own pieces), signal taken
  next forward  fetch_state, update, publish (own pieces), signal published | wait published, fetch (the whole unit)

A place in a ring is used again when all owners have signalled taken. A unit that stays on the card is updated there by
every worker alike, from the same sums, read back after signal summed. Reading and writing over waves is as with one worker,
but the sum of the waves before is the owners' to add. Two more things keep steps apart: `decide` needs a number from every
worker, and everything before it is complete by then; and a flush ends when all workers have flushed.

A wait stands in the list behind the worker's own signal of the same, so workers that run their lists in order cannot wait
for each other in a circle. Towards the worker's own ops a wait counts as the writer of what it makes readable, and a signal
taken as the writer of what it gives back: then all edges follow from the buffers, as they do for one worker. Rejected:
summing on the processor (its memory is what all cards share already), and leaving a worker's own pieces out of its ring
(the sums would depend on who owns what).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from muletrain.schedule.layout import Layout
from muletrain.schedule.ops import PHASES, Buffer, Resource, StreamPlan
from muletrain.schedule.program import Program

PARTS: Final = 2
"""Buffers on the card: one is filled while the other is added up and stored."""


def ring_slot(plan: StreamPlan, unit: int) -> int:
    """Where in a worker's ring the unit's gradient goes: blocks in turn; embedding and head share the last place."""
    return plan.ring if unit in (0, len(plan.units) - 1) else unit % plan.ring


def ring_sizes(sizes: Sequence[int], ring: int) -> list[int]:
    """Elements at each place of a worker's ring, of units of these sizes."""
    return [max(sizes[1:-1])] * ring + [max(sizes[0], sizes[-1])]


class Exchange:
    """Adds to a program what a worker exchanges with the others."""

    def __init__(self, program: Program, plan: StreamPlan, layout: Layout) -> None:
        self._add, self._plan, self._layout = program.add, plan, layout
        self._me = plan.worker
        self._others = tuple(worker for worker in range(plan.workers) if worker != self._me)
        self._in_ring: dict[int, tuple[int, int]] = {}
        """Place in the ring -> (unit, wave) whose gradient this step put there last."""
        self._summed: list[int] = []
        """Units on the card whose sums are still to be read back."""
        self._staged = self._filled = 0
        self._told = -1
        """The latest signal."""

    def _owners(self, unit: int) -> tuple[int, ...]:
        """The other workers that own a piece of `unit`."""
        return tuple(worker for worker in self._others if self._plan.owned(unit, worker))

    # --- parameters ------------------------------------------------------------------------------------------------

    def refresh(self, unit: int, wave: int, load_behind: int = -1, publish_behind: int = -1) -> int:
        """The pending update of this worker's pieces. Returns its last fetch."""
        plan, mine = self._plan, self._plan.owned(unit, self._me)
        for piece in mine:
            elements = plan.units[unit].pieces[piece]
            staging, state = Buffer("staging", (self._staged % plan.staging,)), Buffer("host_state", (unit, piece))
            self._staged += 1
            load_behind = self._add(
                "fetch_state", "up", (state, Buffer("host_gradient", (unit, piece))), (staging,),
                unit=unit, wave=wave, piece=piece, size_bytes=round(elements * plan.state_up_bytes), behind=load_behind,
            )  # fmt: skip
            self._add(
                "update", "update", (staging,), (staging,),
                unit=unit, wave=wave, piece=piece, memory_bytes=elements * (plan.state_up_bytes + plan.state_down_bytes),
            )  # fmt: skip
            self._add(
                "publish", "down", (staging,), (state, Buffer("host_parameters", (unit, piece))),
                unit=unit, wave=wave, piece=piece, size_bytes=round(elements * plan.state_down_bytes), behind=publish_behind,
            )  # fmt: skip
        if mine:
            self._signal("published", "down", unit, wave, reads=self._pieces("host_parameters", unit, (self._me,)))
        return load_behind

    def fetch_published(self, unit: int, wave: int) -> None:
        """The unit's parameters, once all owners have updated theirs."""
        plan, slot = self._plan, self._layout.slots[unit]
        self._wait("published", "peers", unit, wave, self._owners(unit), "host_parameters")
        reads = tuple(Buffer("host_parameters", (unit, piece)) for piece in range(len(slot)))
        size = plan.units[unit].parameters * plan.working_bytes
        self._add("fetch", "peers", reads, slot, unit=unit, wave=wave, size_bytes=size)

    # --- gradients -------------------------------------------------------------------------------------------------

    def sum_up(self, unit: int, wave: int, *, last: bool, accumulate: bool, behind: int) -> None:
        """A unit's gradient after its last micro-batch of a wave. `last`: of a step's waves. `accumulate`: the host holds the
        sum of the waves before. `behind`: the op that completes the gradient."""
        plan, shape, slot = self._plan, self._plan.units[unit], ring_slot(self._plan, unit)
        ring, before = Buffer("ring", (self._me, slot)), self._in_ring.get(slot)
        if before is not None:
            self._wait_for_ring(before, ring, behind)
        self._in_ring[slot] = (unit, wave)
        gradient, size = self._layout.gradients[unit], shape.parameters * plan.gradient_bytes
        self._add("store_part", "down", (gradient,), (ring,), unit=unit, wave=wave, size_bytes=size)
        self._signal("stored", "down", unit, wave, reads=(ring,))
        mine = plan.owned(unit, self._me)
        if last:
            self._summed += [unit] if plan.placed(unit) == "card" else []
        if mine:
            self._sum_mine(unit, wave, mine, slot, last=last, accumulate=accumulate)
        while self._summed and self._summed[0] != unit:  # one unit behind, so that nothing waits for a sum just begun
            self._collect(self._summed.pop(0), wave)

    def _sum_mine(self, unit: int, wave: int, mine: tuple[int, ...], slot: int, *, last: bool, accumulate: bool) -> None:
        plan = self._plan
        rings = tuple(Buffer("ring", (worker, slot)) for worker in range(plan.workers))
        self._wait("stored", "peers", unit, wave, self._others, "ring")
        for piece in mine:
            self._sum_piece(unit, wave, piece, rings, last=last, accumulate=accumulate)
        taken = tuple(ring for ring in rings if ring.index[0] != self._me)
        self._signal("taken", "peers", unit, wave, writes=taken)
        if last and plan.placed(unit) == "card":
            self._signal("summed", "sums", unit, wave, reads=self._pieces("host_gradient", unit, (self._me,)))

    def _sum_piece(self, unit: int, wave: int, piece: int, rings: tuple[Buffer, ...], *, last: bool, accumulate: bool) -> None:
        elements = self._plan.units[unit].pieces[piece]
        size = elements * self._plan.gradient_bytes
        parts, total = Buffer("parts", (self._filled % PARTS,)), Buffer("host_gradient", (unit, piece))
        self._filled += 1
        reads = (*rings, total) if accumulate else rings
        at = {"unit": unit, "wave": wave, "piece": piece}
        self._add("fetch_part", "peers", reads, (parts,), **at, size_bytes=size * len(reads))
        writes = (parts, Buffer("sums", (unit, piece))) if last else (parts,)
        self._add("sum", "update", (parts,), writes, **at, memory_bytes=float(size * (len(reads) + 1)))
        self._add("store_sum", "sums", (parts,), (total,), **at, size_bytes=size)

    def collect_rest(self, wave: int) -> None:
        """At the end of a step."""
        while self._summed:
            self._collect(self._summed.pop(0), wave)

    def _collect(self, unit: int, wave: int) -> None:
        """The sums of a unit that stays on the card, back there."""
        plan, shape = self._plan, self._plan.units[unit]
        self._wait("summed", "peers", unit, wave, self._owners(unit), "host_gradient")
        reads = self._pieces("host_gradient", unit, range(plan.workers))
        size = shape.parameters * plan.gradient_bytes
        self._add("fetch_gradient", "peers", reads, (self._layout.gradients[unit],), unit=unit, wave=wave, size_bytes=size)

    def sums(self) -> tuple[Buffer, ...]:
        """Where this worker's share of the squared norm is."""
        trainable = (unit for unit, shape in enumerate(self._plan.units) if shape.trainable)
        return tuple(Buffer("sums", (unit, piece)) for unit in trainable for piece in self._plan.owned(unit, self._me))

    # --- signals ---------------------------------------------------------------------------------------------------

    def _pieces(self, place: str, unit: int, workers: Iterable[int]) -> tuple[Buffer, ...]:
        return tuple(Buffer(place, (unit, piece)) for worker in workers for piece in self._plan.owned(unit, worker))  # type: ignore[arg-type]

    def _signal(
        self,
        phase: str,
        resource: Resource,
        unit: int,
        wave: int,
        reads: tuple[Buffer, ...] = (),
        writes: tuple[Buffer, ...] = (),
    ) -> None:
        flag = Buffer("flag", (PHASES.index(phase), self._me, unit))
        self._told = self._add("signal", resource, reads, (*writes, flag), unit=unit, wave=wave)

    def _wait(self, phase: str, resource: Resource, unit: int, wave: int, workers: tuple[int, ...], place: str) -> None:
        """Until `workers` have signalled; what they have written at `place` can be read then."""
        flags = tuple(Buffer("flag", (PHASES.index(phase), worker, unit)) for worker in workers)
        if place == "ring":
            writes = tuple(Buffer("ring", (worker, ring_slot(self._plan, unit))) for worker in workers)
        else:
            writes = self._pieces(place, unit, workers)
        if flags:
            self._add("wait", resource, flags, writes, unit=unit, wave=wave, behind=self._told)

    def _wait_for_ring(self, before: tuple[int, int], ring: Buffer, behind: int) -> None:
        unit, wave = before
        flags = tuple(Buffer("flag", (PHASES.index("taken"), worker, unit)) for worker in self._owners(unit))
        if flags:
            self._add("wait", "down", flags, (ring,), unit=unit, wave=wave, behind=behind)
