"""What the schedules of a box's workers compute together, whatever the timing: interpreted on symbols, side by side, in random
legal orders over two steps, they leave in host memory what a plain description of the steps gives."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from muletrain.schedule.build import build, waves_of
from muletrain.schedule.layout import Layout
from muletrain.schedule.ops import Buffer, Op, Schedule, StepShape, StreamPlan
from tests.schedule.plans import step, team_case

SHARED = ("host_parameters", "host_state", "host_gradient", "ring")
Memory = dict[tuple[int, Buffer], Any]
"""By worker; what all share is worker 0's."""


class Workers:
    """All workers' memory, and their ops on it."""

    def __init__(self, workers: int) -> None:
        self.memory: Memory = {}
        self.workers = workers

    def get(self, worker: int, buffer: Buffer) -> Any:
        key = (0 if buffer.place in SHARED else worker, buffer)
        return self.memory.get(key, ("initial", *buffer))  # the same on every worker: replicas

    def put(self, worker: int, buffer: Buffer, value: Any) -> None:
        self.memory[0 if buffer.place in SHARED else worker, buffer] = value

    def run(self, worker: int, op: Op) -> None:
        """The effect of one op. Signals and waits have none: only when they may run matters."""
        values = tuple(self.get(worker, buffer) for buffer in op.reads)
        if op.kind in ("fetch", "send", "receive"):
            written = list(zip(op.writes, values, strict=True))
        elif op.kind in ("store_part", "fetch_state", "fetch_part", "store_sum", "fetch_gradient"):
            value = values[0] if len(values) == 1 else values
            written = [(op.writes[0], value)]
        elif op.kind in ("update", "sum"):
            new = hash((op.kind, op.unit, op.piece, *values))
            written = [(buffer, new) for buffer in op.writes]
        elif op.kind == "publish":
            written = [(buffer, values[0]) for buffer in op.writes]
        elif op.kind in ("forward", "epilogue", "backward"):
            written = self._model(worker, op)
        else:
            written = []
        for buffer, value in written:
            self.put(worker, buffer, value)

    def _model(self, worker: int, op: Op) -> list[tuple[Buffer, Any]]:
        def of(place: str) -> tuple[Any, ...]:
            return tuple(self.get(worker, buffer) for buffer in op.reads if buffer.place == place)

        key = (worker, op.unit, op.micro_batch, of("slot"), of("input"))
        if op.kind == "forward":
            return [(b, hash((b.place, key))) for b in op.writes]
        down = hash(("backward", key, of("hidden_gradient"), of("kept")))
        return [
            (b, down if b.place == "hidden_gradient" else hash((of("gradient"), down))) for b in op.writes if b.place != "sums"
        ]


def play(schedules: list[Schedule], world: Workers, draw: random.Random) -> None:
    """All ops of one step in a random order that resources, `after` and signals allow."""
    queues: list[tuple[int, list[Op]]] = []
    for worker, schedule in enumerate(schedules):
        by: dict[str, list[Op]] = {}
        for op in reversed(schedule.ops):
            by.setdefault(op.resource, []).append(op)
        queues += [(worker, queue) for queue in by.values()]
    done: list[set[int]] = [set() for _ in schedules]
    told: set[tuple[tuple[int, ...], int]] = set()

    def able(worker: int, op: Op) -> bool:
        awaited = [(b.index, op.wave) for b in op.reads if b.place == "flag"] if op.kind == "wait" else []
        return done[worker].issuperset(op.after) and told.issuperset(awaited)

    while any(queue for _, queue in queues):
        ready = [(worker, queue) for worker, queue in queues if queue and able(worker, queue[-1])]
        worker, queue = draw.choice(ready)  # none: they wait for each other for ever
        op = queue.pop()
        world.run(worker, op)
        done[worker].add(op.id)
        if op.kind == "signal":
            told.add((op.writes[-1].index, op.wave))


def reference(plans: list[StreamPlan], steps: list[StepShape]) -> Memory:
    """The same steps without slots, staging, rings, links or timing."""
    plan, world = plans[0], Workers(len(plans))
    layout = Layout(plan)
    parameters = [
        [
            ("initial", *(layout.slots[u][p] if plan.placed(u) != "streamed" else Buffer("host_parameters", (u, p))))
            for p in range(len(shape.pieces))
        ]
        for u, shape in enumerate(plan.units)
    ]
    for shape in steps:
        for u, unit in enumerate(plan.units):
            if shape.pending and unit.trainable:
                update(world, plan, u, parameters[u])
        sums(world, plan, shape, parameters)
    return world.memory


def update(world: Workers, plan: StreamPlan, u: int, parameters: list[Any]) -> None:
    """A unit with its summed gradient: once on the host, or alike on every card."""
    pieces = range(len(plan.units[u].pieces))
    gradient = tuple(world.get(0, Buffer("host_gradient", (u, p))) for p in pieces)
    for p in pieces:
        if plan.placed(u) == "card":
            state, whole = Buffer("card_state", (u, p)), gradient if len(gradient) > 1 else gradient[0]
            parameters[p] = hash(("update", u, p, world.get(0, state), whole))
            for worker in range(world.workers):
                world.put(worker, state, parameters[p])
        else:
            state = Buffer("host_state", (u, p))
            parameters[p] = hash(("update", u, p, (world.get(0, state), gradient[p])))
            world.put(0, state, parameters[p])
            world.put(0, Buffer("host_parameters", (u, p)), parameters[p])


def sums(world: Workers, plan: StreamPlan, shape: StepShape, parameters: list[list[Any]]) -> None:
    """All workers' gradients, added up: after each wave where a gradient buffer is shared, else after the last."""
    layout, waves = Layout(plan), waves_of(plan, shape)
    own: list[dict[int, Any]] = [{} for _ in range(world.workers)]
    totals: dict[tuple[int, int], Any] = {}
    for wave in waves:
        for worker in range(world.workers):
            gradients(plan, worker, wave, parameters, own[worker])
        for u, unit in enumerate(plan.units):
            shared = layout.sharers[layout.gradients[u]] > 1
            if unit.trainable and (shared or wave == waves[-1]):
                for p in range(len(unit.pieces)):
                    before = (totals[u, p],) if shared and wave != waves[0] else ()
                    totals[u, p] = hash(("sum", u, p, (*(each[u] for each in own), *before)))
                if shared:
                    for each in own:
                        del each[u]
    for (u, p), total in totals.items():
        world.put(0, Buffer("host_gradient", (u, p)), total)


def gradients(plan: StreamPlan, worker: int, wave: range, parameters: list[list[Any]], own: dict[int, Any]) -> None:
    """One worker's gradients of a wave, by unit, added to those of `own`."""
    head, used = len(plan.units) - 1, [tuple(pieces) for pieces in parameters]
    inputs: dict[tuple[int, int], tuple[Any, ...]] = {(0, m): () for m in wave}
    for u in range(head):
        for m in wave:
            inputs[u + 1, m] = (hash(("input", (worker, u, m, used[u], inputs[u, m]))),)
    carried: dict[int, Any] = {}
    for u in range(head, -1 if plan.units[0].trainable else 0, -1):
        for m in wave:
            key = (worker, u, m, used[u], inputs[u, m])
            keeps = u != head and plan.policy(u, m) != "recompute"
            above = () if u == head else (carried[m],)
            carried[m] = hash(("backward", key, above, (hash(("kept", key)),) if keeps else ()))
            own[u] = hash(((own[u],) if u in own else (), carried[m]))


def cases(seed: int) -> tuple[list[StreamPlan], list[StepShape]]:
    """Two steps, the second with updates pending."""
    plans, shape = team_case(seed, workers=2 + seed % 2)
    work = list(shape.micro_batches) or [5]
    trainable = any(unit.trainable for unit in plans[0].units)
    return plans, [step(*work), step(*work, pending=trainable)]


@pytest.mark.parametrize("seed", range(60))
def test_any_timing_of_all_workers_gives_the_plain_steps(seed: int) -> None:
    plans, steps = cases(seed)
    expected = reference(plans, steps)
    for order in range(3):
        world, draw = Workers(len(plans)), random.Random(order)
        for shape in steps:
            play([build(plan, shape) for plan in plans], world, draw)
        assert {key: world.memory.get(key) for key in expected} == expected


def test_a_wait_that_is_left_out_shows() -> None:
    """The test above can fail: without its waits for others a worker's steps give something else in some order."""
    plans, steps = cases(1)
    expected = reference(plans, steps)
    results = []
    for order in range(20):
        world, draw = Workers(len(plans)), random.Random(order)
        for shape in steps:
            play([deaf(build(plan, shape)) for plan in plans], world, draw)
        results.append({key: world.memory.get(key) for key in expected} == expected)
    assert not all(results)


def deaf(schedule: Schedule) -> Schedule:
    """Its waits wait for nobody."""
    ops = [dataclasses.replace(op, reads=()) if op.kind == "wait" else op for op in schedule.ops]
    return schedule.model_copy(update={"ops": tuple(ops)})
