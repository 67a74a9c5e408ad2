"""The streamed strategy on a card: how it is laid out, what it takes there and on the host, and what crosses the link.

The layout is written down as the engine's own StreamPlan, made of the model's shape instead of its modules, so that sizes come
from the same formulas (schedule.memory) and the same buffers (schedule.layout) as the run's. Parameters are counted exactly;
the engine pads each to 256 elements, which no model of use notices.

Beside those buffers a card holds, in turn: one block's activations of one micro-batch (it is recomputed) with their gradients
and the block's; or a chunk's logits in the compute format (the fused loss turns them into their gradient in place) and the
head's gradient, summed over chunks in fp32 and rounded once. The larger counts: expandable segments make one out of the
other. A test holds the sum within 5 % of what the driver reported for 7 B and 13 B shapes on an H200 (docs/LOG.md). With a
tied head, each micro-batch of a wave keeps the head's gradient until the embedding's is there. Under an adapter every unit is
frozen, only fetched, and without gradient or state anywhere; the adapter stays on the card with all of its own.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, Literal

from muletrain.planner.footprint import (
    CARD_CONTEXT_BYTES,
    HOST_PROCESS_BYTES,
    Footprint,
    adapter_state,
    block_activations,
    exchanged_adapters,
)
from muletrain.schedule.formats import StateBytes, state_bytes_of
from muletrain.schedule.memory import card_bytes, host_bytes
from muletrain.schedule.ops import StepShape, StreamPlan, UnitShape
from muletrain.spec.ledger import Ledger, LedgerItem
from muletrain.spec.model_shape import ModelShape
from muletrain.spec.plan import StreamingPlan

SLOTS: Final = 2
STAGING: Final = 3
PIECE: Final = 2**25
"""Elements: large enough that starting a copy does not show (a third of a GB takes 6 ms), small enough to keep three."""
_ALIGN: Final = 256


def unit_parameters(shape: ModelShape) -> tuple[int, ...]:
    """Parameters by unit: embedding (and what else runs before the blocks), blocks, head with the final norm."""
    norm = 2 * shape.hidden if shape.family == "gpt2" else shape.hidden  # gpt2's has a bias
    head = norm + (0 if shape.tied else shape.vocab * shape.hidden)
    return (shape.outside_blocks - head, *shape.block_sizes, head)


def layouts(shape: ModelShape, asked: StreamingPlan, placement: Literal["auto"] | int) -> tuple[StreamingPlan, ...]:
    """The ways to stream on a card, best first: embedding, head and the most blocks whole on it, …, none, not even those two.

    Blocks that stay are the first ones: while they compute, the link brings the next (simulated against blocks spread evenly
    and against the last: up to 3 % faster, never slower). `asked` holds what the recipe decides of waves, formats and updates;
    `placement` is the recipe's own.
    """
    workers = max(1, len(asked.slices))
    piece = min(PIECE, -(-max(unit_parameters(shape)) // (workers * _ALIGN)) * _ALIGN)
    wanted = {"slots": SLOTS, "staging": STAGING, "piece": piece, "inputs": "host"}
    last = shape.layers + 1
    counts = range(shape.layers, -1, -1) if placement == "auto" else [min(placement, shape.layers)]
    whole = [(0, *range(1, count + 1), last) for count in counts]
    if not placement or placement == "auto":
        whole.append(())
    return tuple(asked.model_copy(update={**wanted, "on_card": units}) for units in whole)


def stream_plan(shape: ModelShape, run: Footprint) -> StreamPlan:
    """What strategy.stream will lay out for `run.streaming`."""
    streaming, state = run.streaming, _formats(run)
    sizes = unit_parameters(shape)
    last = len(sizes) - 1
    sharing = 1 if run.adapter.trains else run.workers  # frozen units have no gradient to add up or state to share out
    kept = round(block_activations(shape, run) / run.tokens)
    whole = streaming.on_card if sharing == 1 else ()  # nothing of them is staged or added up
    most = [max(1, size) if number in whole else streaming.piece for number, size in enumerate(sizes)]
    slices = [_slices(*unit, sharing) for unit in zip(sizes, most, strict=True)]
    units = tuple(
        UnitShape(
            parameters=size,
            trainable=not run.adapter.trains,
            kind=0 if number == 0 else 2 if number == last else 1,
            pieces=tuple(piece for mine in slices[number] for piece in mine),
            owners=tuple(owner for owner, mine in enumerate(slices[number]) for _ in mine) if sharing > 1 else (),
            forward_flops_a_token=2.0 * size if number else 0.0,
            kept_bytes_a_token=kept if 0 < number < last else 0,
        )
        for number, size in enumerate(sizes)
    )
    return StreamPlan(
        units=units,
        hidden=shape.hidden,
        slots=streaming.slots,
        staging=streaming.staging,
        waves=streaming.waves,
        working_bytes=state.working,
        state_up_bytes=state.up,
        state_down_bytes=state.down,
        gradient_bytes=state.gradient,
        activations=("recompute", *(streaming.activations or ("recompute",) * shape.layers), "recompute"),
        inputs=streaming.inputs,
        offload_every=streaming.offload_every,
        update=streaming.update,
        working_in_master=not state.own_working,
        placement=tuple("card" if number in streaming.on_card else "streamed" for number in range(len(units))),
        workers=sharing,
        ring=streaming.ring,
    )


def streamed_on_card(shape: ModelShape, run: Footprint) -> Ledger:
    """All parts, on each card and on the host, of all workers together."""
    plan = stream_plan(shape, run)
    # Buffers are as large as the largest wave; how it is cut into micro-batches makes no difference to them.
    wave = run.tokens * -(-run.rounds // min(plan.waves, run.rounds))
    step = StepShape(micro_batches=(wave,), sequence_length=run.sequence_length, pending=True, mode="train")
    return Ledger(items=(*_card(shape, run, plan, step), *_host(run, plan, step)))


def traffic_bytes(shape: ModelShape, run: Footprint) -> tuple[int, int]:
    """(to a card, back) in one step, at most: what buffers still hold from forward to backward is not moved again."""
    plan, state, waves = stream_plan(shape, run), _formats(run), min(run.streaming.waves, run.rounds)
    inputs = 0
    if plan.inputs == "host":
        inputs = shape.layers * run.rounds * run.tokens * plan.hidden * plan.working_bytes
    if plan.workers > 1:
        up, down = _shared_traffic(run, plan, waves)
        return round(up) + inputs, round(down) + inputs
    travels = sum(unit.parameters for number, unit in enumerate(plan.units) if plan.placed(number) != "card")
    in_backward = plan.update == "in_backward"
    fetches, stores = (2 * waves, waves - 1) if in_backward else (2 * waves - 1, waves)
    if run.adapter.trains:
        exchanged = round(exchanged_adapters(run)[0]) if run.workers > 1 else 0
        up = travels * 2 * waves * state.working + inputs
        return up + exchanged, inputs + exchanged // run.workers
    updates = state.up - (plan.on_card_in_backward_bytes if in_backward else 0)
    up = travels * (updates + fetches * state.working + (waves - 1) * state.gradient)
    return round(up) + inputs, round(travels * (state.down + stores * state.gradient)) + inputs


def _shared_traffic(run: Footprint, plan: StreamPlan, waves: int) -> tuple[float, float]:
    """Of one of several workers, beside inputs: it updates its share, and adds up all workers' parts of the gradients of it."""
    state, workers = _formats(run), run.workers
    stays = sum(unit.parameters for number, unit in enumerate(plan.units) if plan.placed(number) == "card")
    travels = sum(unit.parameters for unit in plan.units) - stays
    up = travels * (state.up / workers + 2 * waves * state.working + (waves + (waves - 1) / workers) * state.gradient)
    down = travels * (state.down / workers + waves * (1 + 1 / workers) * state.gradient)
    return up + stays * 2 * state.gradient, down + stays * (1 + 1 / workers) * state.gradient


def _formats(run: Footprint) -> StateBytes:
    return state_bytes_of(run.compute, run.streaming.moments, run.streaming.gradients)


def _slices(size: int, most: int, workers: int) -> list[tuple[int, ...]]:
    """By worker: the pieces of a unit that it updates."""
    return [_pieces(b - a, most) for a, b in pairwise(size * part // workers for part in range(workers + 1))]


def _pieces(size: int, most: int) -> tuple[int, ...]:
    if not size:
        return ()
    count = -(-size // most)
    return tuple(b - a for a, b in pairwise(size * part // count for part in range(count + 1)))


def _card(shape: ModelShape, run: Footprint, plan: StreamPlan, step: StepShape) -> list[LedgerItem]:
    state, c, wave = _formats(run), plan.working_bytes, step.micro_batches[0]
    head = shape.vocab * shape.hidden
    logits = c * min(run.loss_chunk, run.tokens) * shape.vocab
    sizes = card_bytes(plan, step, logits_bytes=logits, context_bytes=CARD_CONTEXT_BYTES)
    blocks = [number for number in range(1, shape.layers + 1) if plan.placed(number) == "card"]
    slots = len(blocks) + min(plan.slots, shape.layers - len(blocks))
    held = f"{slots} blocks + embedding and head"
    rows = 2 if plan.inputs == "host" else shape.layers + 1
    parts: list[tuple[str, int, str]] = [
        ("slots", sizes["slots"], f"{c} bytes x ({held})"),
        (
            "staging",
            sizes["staging"] + _narrowing(run, plan),
            f"{plan.staging} x {max(state.up, state.down):g} bytes x the largest piece of state",
        ),
        ("gradients", sizes["gradients"] * state.master // 4, f"{state.master} bytes x ({held})"),
        ("state", sizes["state"], f"{state.beside_working:g} bytes x parameters whose state stays on the card"),
        ("inputs", sizes["inputs"], f"{rows} x {c} bytes x hidden x {wave} tokens of a wave"),
        ("hidden gradients", sizes["hidden_gradients"], f"{c} bytes x hidden x {wave} tokens of a wave"),
        *_passing(shape, run, logits),
        ("kept", sizes["kept"], f"activations of {plan.activations.count('keep')} blocks, {wave} tokens of a wave"),
        ("offload", _offload(shape, run, plan), "what blocks save of a micro-batch, twice on its way out and twice back"),
        ("context", sizes["context"], "0.75 GiB of CUDA and its libraries"),
    ]
    if run.adapter.trains:
        size, how = adapter_state(run)
        beside = c * slots * run.adapter.parameters // shape.layers  # a block's part of the adapter in each slot
        return _items("card", [*parts, ("adapter", round(size) + beside, how)])
    if plan.workers > 1:
        parts.append(("parts", sizes["parts"], f"gradients of {run.workers} workers to be summed, of the largest piece, twice"))
    if shape.tied:
        count = wave // run.tokens
        parts.append(("tied gradients", c * head * count, f"{c} bytes x head x {count} micro-batches of a wave"))
    return _items("card", parts)


def _narrowing(run: Footprint, plan: StreamPlan) -> int:
    """A piece's gradient in the host's format, each way, where that is not the sums'."""
    state = _formats(run)
    if state.gradient == state.master or run.adapter.trains:
        return 0
    travel = [unit for number, unit in enumerate(plan.units) if plan.placed(number) != "card"]
    return 2 * state.gradient * max((piece for unit in travel for piece in unit.pieces), default=0)


def _offload(shape: ModelShape, run: Footprint, plan: StreamPlan) -> int:
    return round(2 * plan.offload_buffers * block_activations(shape, run)) if "offload" in plan.activations else 0


def _passing(shape: ModelShape, run: Footprint, logits: int) -> list[tuple[str, int, str]]:
    """What is there for a moment: the larger of a block's backward and the head's, which use the same memory in turn."""
    c = run.bytes_of[1]
    wide = max(4, c)
    gradients = c * (3 * shape.ffn + 2 * shape.hidden) * run.tokens
    trained = 0 if run.adapter.trains else 1
    block = [
        ("activations", round(block_activations(shape, run)), f"one block's, {run.tokens} tokens of a micro-batch"),
        ("activation gradients", gradients, f"{c} bytes x (3 ffn + 2 hidden) x {run.tokens} tokens: at the widest"),
        ("workspace", trained * c * shape.block_parameters, f"{c} bytes x a block's parameters: their gradients"),
    ]
    if run.adapter.trains:
        numbers = sum(linear.inputs + linear.outputs for linear in shape.adapted(run.adapter.targets))
        how = f"{c} bytes x inputs and outputs of adapted layers, once more, x {run.tokens} tokens"
        block.append(("adapter activations", c * numbers * run.tokens, how))
    head = [
        ("logits", logits, f"{c} bytes x {min(run.loss_chunk, run.tokens)} tokens x {shape.vocab} words"),
        (
            "workspace",
            trained * (wide + (c if c < wide else 0)) * shape.vocab * shape.hidden,
            f"{wide} bytes x head: its gradient, then rounded",
        ),
    ]
    return max(block, head, key=lambda parts: sum(size for _, size, _ in parts))


def _host(run: Footprint, plan: StreamPlan, step: StepShape) -> list[LedgerItem]:
    state, sizes, wave = _formats(run), host_bytes(plan, step), step.micro_batches[0]
    rows = max(0, len(plan.units) - 3) if plan.inputs == "host" else 0  # all blocks but the last
    what = "parameters that stream" if run.streaming.on_card else "parameters"
    each, exchanged = f", x {run.workers} workers" if run.workers > 1 else "", exchanged_adapters(run)
    offloading = plan.activations.count("offload")
    sent = -(-(wave // run.tokens) // plan.offload_every)
    kept = offloading * run.workers * sent * run.tokens * plan.units[1].kept_bytes_a_token
    return _items(
        "host",
        [
            ("parameters", sizes["parameters"], f"{plan.working_bytes} bytes x {what}"),
            (
                "state",
                sizes["state"],
                f"{state.beside_working:g} bytes x {what}: the rest of the master, two {run.streaming.moments} moments",
            ),
            ("gradients", sizes["gradients"], f"{state.gradient} bytes x {what}"),
            ("rings", sizes.get("rings", 0), f"{state.gradient} bytes x ({plan.ring} blocks + embedding){each}"),
            (
                "inputs",
                sizes["inputs"] * run.workers // plan.workers,
                f"{plan.working_bytes} bytes x hidden x {wave} tokens of a wave x {rows} blocks{each}",
            ),
            *([("adapter exchange", round(exchanged[0]), exchanged[1])] if run.adapter.trains and run.workers > 1 else []),
            ("activations", kept, f"of {offloading} blocks, one of {plan.offload_every} micro-batches of a wave{each}"),
            ("context", HOST_PROCESS_BYTES * run.workers, f"2 GiB: libraries, CUDA's host side{each}"),
        ],
    )


def _items(place: Literal["card", "host"], parts: list[tuple[str, int, str]]) -> list[LedgerItem]:
    return [LedgerItem(part=part, place=place, size_bytes=size, formula=how) for part, size, how in parts if size]
