"""What a schedule computes, whatever the timing: its ops are interpreted on symbols, in random legal orders, and must leave in
host memory what a plain recursive description of the step gives. Released memory need not be poisoned: a symbol read too
early or too late is another symbol."""

from __future__ import annotations

import random

import pytest

from muletrain.schedule.build import build, waves_of
from muletrain.schedule.layout import Layout
from muletrain.schedule.ops import Buffer, Op, Schedule, StepShape, StreamPlan
from tests.schedule.plans import random_case

Symbol = object
Memory = dict[Buffer, Symbol]


def initial(buffer: Buffer) -> Symbol:
    return ("initial", *buffer)


def read(memory: Memory, op: Op, place: str) -> tuple[Symbol, ...]:
    return tuple(memory.get(b, initial(b)) for b in op.reads if b.place == place)


def run_op(op: Op, memory: Memory) -> None:
    """The effect of one op."""
    written = {b.place: b for b in op.writes}
    values = [memory.get(b, initial(b)) for b in op.reads]
    if op.kind in ("fetch", "send", "receive", "store", "fetch_gradient"):  # plain copies, buffer by buffer
        memory.update(zip(op.writes, values, strict=True))
    elif op.kind == "fetch_state":
        memory[op.writes[0]] = tuple(values)
    elif op.kind == "update":
        new = hash(("update", op.unit, op.piece, *values))
        memory.update(dict.fromkeys(op.writes, new))
    elif op.kind == "publish":
        assert values[0] == values[1]
        memory[written["host_state"]] = memory[written["host_parameters"]] = values[0]
    elif op.kind == "norm":
        gradient, sums = values
        memory[written["sums"]] = hash((sums, "norm", op.unit, gradient))
        if "gradient" in written:
            memory[written["gradient"]] = measured(gradient)
    elif op.kind != "decide":
        run_model(op, memory, written)


def measured(gradient: Symbol) -> Symbol:
    """A gradient with the word on whether it may be applied."""
    return hash(("measured", gradient))


def run_model(op: Op, memory: Memory, written: dict[str, Buffer]) -> None:
    """forward, epilogue, backward: a new symbol from all that is read."""
    key = (op.unit, op.micro_batch, read(memory, op, "slot"), read(memory, op, "input"))
    if op.kind == "forward":
        memory[written["input"]] = hash(("forward", key))
        if "kept" in written:
            memory[written["kept"]] = hash(("kept", key))
        return
    down = hash(("backward", key, read(memory, op, "hidden_gradient"), read(memory, op, "kept")))
    if "gradient" in written:
        memory[written["gradient"]] = hash((read(memory, op, "gradient"), down))
    if "hidden_gradient" in written:
        memory[written["hidden_gradient"]] = down
    if op.kind == "epilogue" or "sums" in written:
        sums = memory.get(written["sums"], initial(written["sums"]))
        memory[written["sums"]] = hash((sums, op.kind, down))


def reference(plan: StreamPlan, step: StepShape) -> Memory:
    """The step without slots, staging, rings or links."""
    host: Memory = {}

    def value(place: str, unit: int, *piece: int) -> Symbol:
        buffer = Buffer(place, (unit, *piece))  # type: ignore[arg-type]
        return host.get(buffer, initial(buffer))

    layout = Layout(plan)
    parameters = [
        [
            initial(layout.slots[u][p] if plan.placed(u) != "streamed" else Buffer("host_parameters", (u, p)))
            for p in range(len(shape.pieces))
        ]
        for u, shape in enumerate(plan.units)
    ]

    def update(unit: int, gradient: Symbol | None) -> None:
        for p in range(len(plan.units[unit].pieces)):
            if plan.placed(unit) == "card":
                state = value("card_state", unit, p)
                taken = (state, initial(layout.gradients[unit]) if gradient is None else gradient)
            else:
                state = value("host_state", unit, p)
                pended = gradient is None
                taken = ((state, value("host_gradient", unit)),) if pended else ((state,), gradient, parameters[unit][p])
            parameters[unit][p] = new = hash(("update", unit, p, *taken))
            if plan.placed(unit) == "card":
                host[Buffer("card_state", (unit, p))] = new
            else:
                host[Buffer("host_state", (unit, p))] = host[Buffer("host_parameters", (unit, p))] = new

    if step.pending:
        for u, shape in enumerate(plan.units):
            if shape.trainable:
                update(u, None)
    if step.mode == "flush":
        return host
    head = len(plan.units) - 1
    used = [tuple(pieces) for pieces in parameters]  # of this step; updates in backward are for the next
    gradients: dict[int, Symbol] = {}
    sums = initial(Buffer("sums", ()))
    waves = waves_of(plan, step)
    for wave in waves:
        last = wave == waves[-1]
        hidden: dict[int, list[tuple[Symbol, ...]]] = {m: [()] for m in wave}
        for u in range(head):
            for m in wave:
                hidden[m].append((hash(("forward", (u, m, used[u], hidden[m][u]))),))
        carried: dict[int, Symbol] = {}
        lowest = 0 if step.mode == "evaluate" or plan.units[0].trainable else 1
        for u in range(head, head - 1 if step.mode == "evaluate" else lowest - 1, -1):
            for m in wave:
                key = (u, m, used[u], hidden[m][u])
                above = () if u == head else (carried[m],)
                keeps = u != head and plan.policy(u, m) != "recompute"
                carried[m] = hash(("backward", key, above, (hash(("kept", key)),) if keeps else ()))
                if u == head:
                    sums = hash((sums, "epilogue", carried[m]))
                elif not plan.units[u].trainable:
                    sums = hash((sums, "backward", carried[m]))
                if step.mode == "train" and plan.units[u].trainable:
                    gradients[u] = hash(((gradients[u],) if u in gradients else (), carried[m]))
            if step.mode == "train" and last and plan.units[u].trainable:
                sums = hash((sums, "norm", u, gradients[u]))
                if plan.update == "in_backward":
                    update(u, measured(gradients[u]))
                elif plan.placed(u) == "card":
                    host[layout.gradients[u]] = gradients[u]
                else:
                    host[Buffer("host_gradient", (u,))] = gradients[u]
    host[Buffer("sums", ())] = sums
    return host


def run(schedule: Schedule, draw: random.Random) -> Memory:
    """All ops in a random order that resources and `after` allow. A copy takes effect at once; the checker's proof covers the
    rest."""
    queues: dict[str, list[Op]] = {}
    for op in reversed(schedule.ops):
        queues.setdefault(op.resource, []).append(op)
    done: set[int] = set()
    memory: Memory = {}
    while any(queues.values()):
        able = [q for q in queues.values() if q and done.issuperset(q[-1].after)]
        op = draw.choice(able).pop()
        run_op(op, memory)
        done.add(op.id)
    return memory


@pytest.mark.parametrize("seed", range(200))
def test_any_timing_gives_the_plain_step(seed: int) -> None:
    chosen, shape = random_case(seed)
    expected = reference(chosen, shape)
    schedule = build(chosen, shape)
    for order in range(5):
        memory = run(schedule, random.Random(order))
        left = {b: v for b, v in memory.items() if b in expected}
        assert left == expected


def test_a_missing_wait_shows() -> None:
    """The test above can fail: without its edges a schedule gives another result in some order."""
    chosen, shape = random_case(0)
    schedule = build(chosen, shape)
    loose = schedule.model_copy(update={"ops": tuple(Op(**{**_fields(op), "after": ()}) for op in schedule.ops)})
    expected = reference(chosen, shape)
    results = []
    for order in range(20):
        try:
            memory = run(loose, random.Random(order))
        except (KeyError, AssertionError):  # a publish before its update
            results.append(False)
        else:
            results.append({b: v for b, v in memory.items() if b in expected} == expected)
    assert not all(results)


def _fields(op: Op) -> dict[str, object]:
    return {name: getattr(op, name) for name in Op.__dataclass_fields__}
