"""(StreamPlan, StepShape) -> Schedule: what a streamed step does, written once, for the engine and the simulator alike.

A step goes forward through the units and back, once a wave. What a buffer still holds is not loaded again: the units at the
turn from forward to backward, and from one wave to the next (turn-around). The program below is sequential; which op waits for
which, and how far transfers run ahead, follows from the buffers it names (see program.py).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from muletrain.schedule.layout import Layout
from muletrain.schedule.ops import Buffer, Place, Schedule, ScheduleError, StepShape, StreamPlan
from muletrain.schedule.program import Program
from muletrain.schedule.workers import Exchange

GRADIENT_SUM_BYTES: Final = 4
"""Gradients are summed over micro-batches in fp32."""
_AHEAD: Final = 3
"""Units by which updates run ahead of forward at most: publishes issued earlier would stand before sends that forward needs."""
_SUMS: Final = Buffer("sums", ())


def build(plan: StreamPlan, step: StepShape) -> Schedule:
    """All ops of one step, in issue order. Raises ScheduleError if plan and step contradict each other."""
    _require_consistent(plan, step)
    builder = _Builder(plan, step)
    if step.mode == "flush":
        builder.flush()
    elif step.mode == "evaluate":
        builder.evaluate()
    else:
        builder.train()
    return Schedule.model_construct(plan=plan, step=step, ops=builder.program.listed())


def waves_of(plan: StreamPlan, step: StepShape) -> list[range]:
    """Micro-batches by wave: contiguous, as even as they go, no wave empty."""
    count = len(step.micro_batches)
    waves = min(plan.waves, count)
    bounds = [count * w // waves for w in range(waves + 1)] if waves else []
    return [range(a, b) for a, b in pairwise(bounds)]


def _require_consistent(plan: StreamPlan, step: StepShape) -> None:
    units = len(plan.units)
    if units < 3:
        raise ScheduleError(f"a streamed model has an embedding, blocks and a head; {units} units given")
    if len(plan.activations) != units:
        raise ScheduleError(f"activations names {len(plan.activations)} units of {units}")
    if plan.placement and len(plan.placement) != units:
        raise ScheduleError(f"placement names {len(plan.placement)} units of {units}")
    for u, unit in enumerate(plan.units):
        if sum(unit.pieces) != unit.parameters:
            raise ScheduleError(f"pieces of unit {u} sum to {sum(unit.pieces)}, it has {unit.parameters} parameters")
    if min(plan.slots, plan.staging, plan.waves) < 1:
        raise ScheduleError("slots, staging and waves must be at least 1")
    if plan.workers > 1:
        _require_team(plan)
    if step.mode == "flush":
        if not step.pending:
            raise ScheduleError("a flush applies pending updates; none are pending")
    elif not step.micro_batches:
        raise ScheduleError(f"{step.mode} without micro-batches")
    if step.pending and step.mode == "evaluate":
        raise ScheduleError("pending updates must be flushed before evaluation")
    if step.pending and plan.update == "in_backward":
        raise ScheduleError("updates in backward leave nothing pending")


def _require_team(plan: StreamPlan) -> None:
    if not 0 <= plan.worker < plan.workers:
        raise ScheduleError(f"worker {plan.worker} of {plan.workers}")
    if plan.update == "in_backward":
        raise ScheduleError("several workers update at the next fetch, not in backward")
    for u, unit in enumerate(plan.units):
        if unit.owners and (len(unit.owners) != len(unit.pieces) or max(unit.owners) >= plan.workers):
            raise ScheduleError(f"unit {u} has {len(unit.pieces)} pieces, owned by {unit.owners} of {plan.workers} workers")


class _Builder:
    """Writes the program of one step."""

    def __init__(self, plan: StreamPlan, step: StepShape) -> None:
        self.program = Program()
        self._add = self.program.add
        self._plan, self._step = plan, step
        self._head = len(plan.units) - 1
        self._waves = waves_of(plan, step)
        self._training = step.mode == "train"
        layout = Layout(plan)
        self._slots, self._gradients, self._sharers = layout.slots, layout.gradients, layout.sharers
        self._holder = {layout.slots[u][0].index[:2]: u for u in range(len(plan.units)) if plan.placed(u) != "streamed"}
        """(kind, slot) -> the unit whose parameters are in it."""
        self._input_holder: dict[Buffer, tuple[int, int]] = {}
        """Input buffer -> (unit, micro-batch)."""
        self._known: dict[Buffer, Buffer] = {}
        self._staged = self._offloaded = 0
        self._last_load = -1
        self._last_forward: dict[int, int] = {}
        self._exchange = Exchange(self.program, plan, layout) if plan.workers > 1 else None
        self._pending = {u for u, shape in enumerate(plan.units) if shape.trainable and step.pending}

    # --- the three modes -------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Every pending update, nothing else."""
        for unit, shape in enumerate(self._plan.units):
            if shape.trainable:
                self._update(unit, 0, chained=True)
                if self._exchange and self._plan.placed(unit) == "parameters":
                    self._exchange.fetch_published(unit, 0)

    def evaluate(self) -> None:
        """Forward only."""
        for wave, micro_batches in enumerate(self._waves):
            self._forward_wave(wave, micro_batches)

    def train(self) -> None:
        """Forward and backward of each wave, then the one wait."""
        for wave, micro_batches in enumerate(self._waves):
            self._forward_wave(wave, micro_batches)
            for unit in range(self._head - 1, -1, -1):
                if unit > 0 or self._plan.units[0].trainable:
                    self._backward_unit(unit, wave, micro_batches)
        sums: tuple[Buffer, ...] = (_SUMS,)
        if self._exchange:
            self._exchange.collect_rest(len(self._waves) - 1)
            sums = (_SUMS, *self._exchange.sums())
        self._add("decide", "host", sums, ())

    # --- forward ---------------------------------------------------------------------------------------------------

    def _forward_wave(self, wave: int, micro_batches: range) -> None:
        for unit in range(self._head):
            self._load(unit, wave)
            for m in micro_batches:
                self._forward(unit, wave, m)
        self._load(self._head, wave)
        if self._training and wave > 0:
            self._fetch_gradient(self._head, wave)
        for m in micro_batches:
            self._epilogue(wave, m)
        if self._training:
            self._finish_gradient(self._head, wave)

    def _load(self, unit: int, wave: int) -> None:
        """The unit's parameters are in its slot: updated, fetched, or there already."""
        slot = self._slots[unit]
        key = slot[0].index[:2]
        if unit in self._pending:
            self._pending.remove(unit)
            self._update(unit, wave, chained=True)
            if self._exchange and self._plan.placed(unit) != "card":
                self._exchange.fetch_published(unit, wave)
        elif self._holder.get(key) != unit:
            reads = tuple(Buffer("host_parameters", (unit, p)) for p in range(len(slot)))
            size = self._plan.units[unit].parameters * self._plan.working_bytes
            self._last_load = self._add(
                "fetch", "up", reads, slot, unit=unit, wave=wave, size_bytes=size, behind=self._last_load
            )
        self._holder[key] = unit

    def _forward(self, unit: int, wave: int, m: int) -> None:
        shape, tokens = self._plan.units[unit], self._step.micro_batches[m]
        reads = self._slots[unit]
        writes: tuple[Buffer, ...] = (self._input(unit + 1, wave, m),)
        if unit > 0:
            reads = (*reads, self._input(unit, wave, m))
            if self._training and self._plan.inputs == "host" and unit < self._head - 1:
                self._send(unit, wave, m, 0)
        kept = self._kept(unit, wave, m) if self._training else None
        if kept:
            writes = (*writes, kept)
        self._last_forward[unit] = self._add(
            "forward", "compute", reads, writes, unit=unit, wave=wave, micro_batch=m, flops=shape.forward_flops_a_token * tokens
        )
        self._input_holder[writes[0]] = (unit + 1, m)
        if kept and self._plan.policy(unit, m) == "offload":
            self._send(unit, wave, m, 1, kept)

    def _epilogue(self, wave: int, m: int) -> None:
        shape, tokens = self._plan.units[self._head], self._step.micro_batches[m]
        reads: tuple[Buffer, ...] = (*self._slots[self._head], self._input(self._head, wave, m))
        writes: tuple[Buffer, ...] = (_SUMS,)
        times = 1
        if self._training:
            times = 3 if shape.trainable else 2
            writes = (*writes, self._hidden_gradient(wave, m))
            if shape.trainable:
                writes = (*writes, self._gradients[self._head])
                if self._adds(self._head, wave, m):
                    reads = (*reads, self._gradients[self._head])
        flops = times * shape.forward_flops_a_token * tokens
        self._add("epilogue", "compute", reads, writes, unit=self._head, wave=wave, micro_batch=m, flops=flops)

    # --- backward --------------------------------------------------------------------------------------------------

    def _backward_unit(self, unit: int, wave: int, micro_batches: range) -> None:
        self._load(unit, wave)
        if wave > 0:
            self._fetch_gradient(unit, wave)
        for m in micro_batches:
            self._backward(unit, wave, m)
        self._finish_gradient(unit, wave)

    def _backward(self, unit: int, wave: int, m: int) -> None:
        plan, shape, tokens = self._plan, self._plan.units[unit], self._step.micro_batches[m]
        hidden_gradient = self._hidden_gradient(wave, m)
        reads: tuple[Buffer, ...] = (*self._slots[unit], hidden_gradient)
        writes: tuple[Buffer, ...] = (hidden_gradient,)
        if unit > 0:
            source = self._input(unit, wave, m)
            if self._input_holder.get(source) != (unit, m):
                self._receive(unit, wave, m, 0, source)
                self._input_holder[source] = (unit, m)
            reads = (*reads, source)
        kept = self._kept(unit, wave, m)
        if kept:
            if plan.policy(unit, m) == "offload":
                self._receive(unit, wave, m, 1, kept)
            reads = (*reads, kept)
        if shape.trainable:
            writes = (*writes, self._gradients[unit])
            if self._adds(unit, wave, m):
                reads = (*reads, self._gradients[unit])
        else:
            writes = (*writes, _SUMS)  # what an adapter that stays on the card adds to the norm
        times = (2.0 if shape.trainable else 1.0) + (plan.recompute_factor if plan.policy(unit, m) == "recompute" else 0.0)
        flops = times * shape.forward_flops_a_token * tokens
        self._add("backward", "compute", reads, writes, unit=unit, wave=wave, micro_batch=m, flops=flops)

    def _adds(self, unit: int, wave: int, m: int) -> bool:
        """Whether the gradient buffer holds a sum that this micro-batch is added to."""
        if self._exchange and self._sharers[self._gradients[unit]] > 1:
            return m > self._waves[wave].start  # what waves before have added up is the owners' to add
        return wave > 0 or m > 0

    def _finish_gradient(self, unit: int, wave: int) -> None:
        """A unit's gradient after its last micro-batch of a wave: measured, stored or used, or left where it is."""
        plan, shape, gradient = self._plan, self._plan.units[unit], self._gradients[unit]
        if not shape.trainable:
            return
        last, in_backward = wave == len(self._waves) - 1, plan.update == "in_backward"
        if self._exchange:
            shared = self._sharers[gradient] > 1
            if last or shared:
                complete = len(self.program.ops) - 1
                self._exchange.sum_up(unit, wave, last=last, accumulate=shared and wave > 0, behind=complete)
            return
        if last:
            read_bytes = float(shape.parameters * GRADIENT_SUM_BYTES)
            found = (_SUMS, gradient) if in_backward else (_SUMS,)  # with the gradient: whether it may be applied
            self._add("norm", "compute", (gradient, _SUMS), found, unit=unit, wave=wave, memory_bytes=read_bytes)
            if in_backward:
                self._update(unit, wave, chained=False)
                return
        if self._sharers[gradient] > 1 or (last and plan.placed(unit) != "card"):
            size = shape.parameters * plan.gradient_bytes
            self._add("store", "down", (gradient,), (Buffer("host_gradient", (unit,)),), unit=unit, wave=wave, size_bytes=size)

    def _fetch_gradient(self, unit: int, wave: int) -> None:
        """The sum of the waves before, unless the gradient buffer is the unit's own and still holds it."""
        shape, gradient = self._plan.units[unit], self._gradients[unit]
        if shape.trainable and self._sharers[gradient] > 1 and not self._exchange:
            size = shape.parameters * self._plan.gradient_bytes
            source = Buffer("host_gradient", (unit,))
            self._add("fetch_gradient", "up", (source,), (gradient,), unit=unit, wave=wave, size_bytes=size)

    # --- pieces of optimizer state ---------------------------------------------------------------------------------

    def _update(self, unit: int, wave: int, *, chained: bool) -> None:
        """Each piece up, updated and published. `chained`: it is how the unit's parameters get to their slot, so it takes
        its turn among the fetches."""
        plan = self._plan
        if plan.placed(unit) == "card":
            self._update_on_card(unit, wave)
            return
        if self._exchange:
            early = self._last_forward.get(unit - _AHEAD, -1)
            self._last_load = self._exchange.refresh(unit, wave, self._last_load, early)
            return
        in_backward = plan.update == "in_backward"
        up = plan.state_up_bytes - (plan.on_card_in_backward_bytes if in_backward else 0)
        for piece, elements in enumerate(plan.units[unit].pieces):
            staging = Buffer("staging", (self._staged % plan.staging,))
            self._staged += 1
            state, slot = Buffer("host_state", (unit, piece)), self._slots[unit][piece]
            gradient = self._gradients[unit] if in_backward else Buffer("host_gradient", (unit,))
            fetched = self._add(
                "fetch_state", "up", (state,) if in_backward else (state, gradient), (staging,),
                unit=unit, wave=wave, piece=piece, size_bytes=round(elements * up), behind=self._last_load if chained else -1,
            )  # fmt: skip
            if chained:
                self._last_load = fetched
            self._add(
                "update", "update", (staging, gradient, slot) if in_backward else (staging,), (staging, slot),
                unit=unit, wave=wave, piece=piece, memory_bytes=elements * (plan.state_up_bytes + plan.state_down_bytes),
            )  # fmt: skip
            self._add(
                "publish", "down", (staging, slot), (state, Buffer("host_parameters", (unit, piece))),
                unit=unit, wave=wave, piece=piece, size_bytes=round(elements * plan.state_down_bytes),
                behind=self._last_forward.get(unit - _AHEAD, -1),
            )  # fmt: skip

    def _update_on_card(self, unit: int, wave: int) -> None:
        plan = self._plan
        for piece, elements in enumerate(plan.units[unit].pieces):
            state = Buffer("card_state", (unit, piece))
            self._add(
                "update", "update", (state, self._gradients[unit]), (state, self._slots[unit][piece]),
                unit=unit, wave=wave, piece=piece, memory_bytes=elements * (plan.state_up_bytes + plan.state_down_bytes),
            )  # fmt: skip

    # --- activations -----------------------------------------------------------------------------------------------

    def _send(self, unit: int, wave: int, m: int, piece: int, kept: Buffer | None = None) -> None:
        source = kept or self._input(unit, wave, m)
        target = self._on_host(unit, wave, m, piece)
        size = self._activation_bytes(unit, m, piece)
        self._add("send", "down", (source,), (target,), unit=unit, wave=wave, micro_batch=m, piece=piece, size_bytes=size)

    def _receive(self, unit: int, wave: int, m: int, piece: int, target: Buffer) -> None:
        source = self._on_host(unit, wave, m, piece)
        size = self._activation_bytes(unit, m, piece)
        self._add("receive", "up", (source,), (target,), unit=unit, wave=wave, micro_batch=m, piece=piece, size_bytes=size)

    def _activation_bytes(self, unit: int, m: int, piece: int) -> int:
        a_token = self._plan.units[unit].kept_bytes_a_token if piece else self._plan.hidden * self._plan.working_bytes
        return a_token * self._step.micro_batches[m]

    def _on_host(self, unit: int, wave: int, m: int, piece: int) -> Buffer:
        start, every = self._waves[wave].start, self._plan.offload_every
        if piece:  # only those that are sent have a place
            return self._one("host_kept", (unit, m // every - -(-start // every)))
        return self._one("host_input", (unit, m - start))

    def _input(self, unit: int, wave: int, m: int) -> Buffer:
        row = unit if self._plan.inputs == "card" else unit % 2
        return self._one("input", (row, m - self._waves[wave].start))

    def _hidden_gradient(self, wave: int, m: int) -> Buffer:
        return self._one("hidden_gradient", (m - self._waves[wave].start,))

    def _kept(self, unit: int, wave: int, m: int) -> Buffer | None:
        """Where what the unit saves for backward is or goes; None if it is computed again."""
        policy = self._plan.policy(unit, m)
        if policy == "recompute" or (unit == 0 and not self._plan.units[0].trainable):
            return None
        if policy == "keep":
            return self._one("kept", (unit, m - self._waves[wave].start))
        self._offloaded += 1
        return self._one("kept", ((self._offloaded - 1) % self._plan.offload_buffers,))

    def _one(self, place: Place, index: tuple[int, ...]) -> Buffer:
        """The one object of its content: schedules name few buffers very often, and the garbage collector visits each."""
        buffer = Buffer(place, index)
        return self._known.setdefault(buffer, buffer)
