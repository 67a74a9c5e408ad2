"""Plans for the tests of this room: tiny ones of known shape, random ones, one of real size."""

from __future__ import annotations

import random
from typing import Any

from muletrain.schedule.ops import Schedule, StepShape, StreamPlan, UnitShape
from muletrain.schedule.rates import Rates


def unit(
    kind: int, pieces: tuple[int, ...] = (10,), *, trainable: bool = True, flops: float = 20.0, kept: int = 7
) -> UnitShape:
    return UnitShape(
        parameters=sum(pieces),
        trainable=trainable,
        kind=kind,
        pieces=pieces,
        forward_flops_a_token=flops,
        kept_bytes_a_token=kept,
    )


def plan(blocks: int = 2, **changes: Any) -> StreamPlan:
    """One kind of block, one piece a unit, everything recomputed."""
    values: dict[str, Any] = {
        "units": (unit(0), *(unit(1) for _ in range(blocks)), unit(2)),
        "hidden": 4,
        "slots": 2,
        "staging": 2,
        "waves": 1,
        "working_bytes": 2,
        "state_up_bytes": 10,
        "state_down_bytes": 8,
        "gradient_bytes": 2,
        "inputs": "card",
        "update": "next_fetch",
    } | changes
    values.setdefault("activations", ("recompute",) * len(values["units"]))
    return StreamPlan(**values)


def step(*micro_batches: int, pending: bool = False, mode: str = "train") -> StepShape:
    return StepShape(micro_batches=micro_batches, sequence_length=8, pending=pending, mode=mode)  # type: ignore[arg-type]


def random_case(seed: int) -> tuple[StreamPlan, StepShape]:
    """A small model of mixed kinds with some frozen units, and a step for it."""
    draw = random.Random(seed)
    blocks = draw.randint(1, 7)
    kinds = draw.choice([1, 1, 2])

    def one(kind: int) -> UnitShape:
        pieces = tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 3)))
        return unit(kind, pieces, trainable=draw.random() < 0.8, flops=draw.randint(1, 50), kept=draw.randint(0, 30))

    units = (one(0), *(one(1 + draw.randrange(kinds)) for _ in range(blocks)), one(draw.choice([0, 9])))
    update = draw.choice(["next_fetch", "next_fetch", "in_backward"])
    chosen = plan(
        units=units,
        slots=draw.randint(1, 3),
        staging=draw.randint(1, 4),
        waves=draw.randint(1, 3),
        inputs=draw.choice(["card", "host"]),
        update=update,
        activations=tuple(draw.choice(["recompute", "keep", "offload"]) for _ in units),
        recompute_factor=draw.choice([1.0, 0.9]),
        offload_buffers=draw.randint(1, 3),
        offload_every=random.Random(seed).choice([1, 1, 2, 3]),
        placement=draw.choice([(), (), tuple(draw.choice(["streamed", "parameters", "card"]) for _ in units)]),
    )
    mode = draw.choice(["train", "train", "train", "evaluate", "flush"])
    pending = mode == "flush" or (mode == "train" and update == "next_fetch" and draw.random() < 0.7)
    if mode == "flush" and update == "in_backward":
        mode, pending = "train", False
    return chosen, step(*(draw.randint(1, 9) for _ in range(draw.randint(1, 5))), pending=pending, mode=mode)


def seven_billion(**changes: Any) -> StreamPlan:
    """The DeepSeek-LLM-7B shape: hidden 4096, 30 layers, ffn 11008, vocabulary 102400, sequence 4096."""
    hidden, layers, ffn, vocabulary, piece = 4096, 30, 11008, 102400, 2**24

    def shape(kind: int, parameters: int, flops: float, kept: int) -> UnitShape:
        whole, rest = divmod(parameters, piece)
        return unit(kind, (piece,) * whole + ((rest,) if rest else ()), flops=flops, kept=kept)

    block = 4 * hidden**2 + 3 * hidden * ffn
    table = vocabulary * hidden
    units = (
        shape(0, table, 0, 0),
        *(shape(1, block, 2 * block + 2 * 4096 * hidden, 132_000) for _ in range(layers)),
        shape(2, table, 2 * table, 0),
    )
    return plan(units=units, hidden=hidden, staging=3, inputs="host", **changes)


BIG_RATES = Rates(
    compute_flops=150e12, up_bytes_s=24.5e9, down_bytes_s=24.5e9, both_bytes_s=45e9, memory_bytes_s=0.9e12, op_overhead_s=2e-5
)


def lines(schedule: Schedule) -> list[str]:
    """An op a line: kind, unit, micro-batch and piece where they apply, and what it waits for."""
    out = []
    for op in schedule.ops:
        words = [op.kind]
        words += [
            f"{letter}{number}" for letter, number in (("u", op.unit), ("m", op.micro_batch), ("p", op.piece)) if number >= 0
        ]
        out.append(" ".join(words) + "".join(f" <{earlier}" for earlier in op.after))
    return out


def team_case(seed: int, workers: int = 3) -> tuple[list[StreamPlan], StepShape]:
    """A random case for several workers with unequal slices, some without a piece of some unit: the plan of each, one step."""
    chosen, shape = random_case(seed)
    draw = random.Random(f"team {seed}")
    units = tuple(
        one.model_copy(update={"owners": tuple(sorted(draw.randrange(workers) for _ in one.pieces))}) for one in chosen.units
    )
    changes = {"units": units, "update": "next_fetch", "workers": workers, "ring": draw.randint(1, 3)}
    return [chosen.model_copy(update={**changes, "worker": worker}) for worker in range(workers)], shape
