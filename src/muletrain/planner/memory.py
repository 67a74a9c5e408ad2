"""Memory of one run as a Ledger: what each part takes on a worker's card and on the box, before anything is built.

m, c: bytes of a number in the master and the compute format; P parameters, B of a block, R outside blocks; N workers.

  resident   master m P, working copy c P (where c < m), gradient sums m P, two moments 2m P
  zero*      master m P/N, moments 2m P/N, gradient shard m P/N, gathered parameters c P (zero3: c (2B + R)),
             whole gradients m P (zero1 with several micro-batches a worker; else one unit's, (c + m) max(B, R))
  streamed   on a CPU: master, gradient and moments 4m P and working copy c P on the host, two slots of c B (moments and
             gradients less in narrower formats); on a card: streamed.py

With an adapter of A parameters the model is frozen, in the compute format and without any state:

  resident   c P, and the adapter whole: working copy c A (where c < m), master, gradient sums and two moments 4m A
  zero*      shard c P/N and what is gathered of it, 4m A/N and the adapter gathered
  streamed   c P on the host and nothing else of it there; the adapter whole on the device

Recomputing keeps h numbers a token a block, and one whole block (footprint.py). Logits: 12 bytes each while a chunk's loss is
computed (24 in fp64).
"""

from __future__ import annotations

from typing import Literal

from muletrain.planner.footprint import (
    COMMUNICATION_BYTES,
    CONTEXT_BYTES,
    HOST_PROCESS_BYTES,
    Footprint,
    adapter_state,
    block_activations,
    exchanged_adapters,
)
from muletrain.planner.streamed import streamed_on_card
from muletrain.schedule.formats import state_bytes_of
from muletrain.spec.ledger import Ledger, LedgerItem
from muletrain.spec.model_shape import ModelShape

SLOTS = 2

Part = tuple[str, float, str]
"""(part, bytes on one worker, formula)"""


def ledger(shape: ModelShape, run: Footprint) -> Ledger:
    """All parts. On a CPU everything is host memory, of all workers together."""
    if run.strategy == "streamed" and run.device == "cuda":
        return streamed_on_card(shape, run)
    shared = _streamed(shape, run) if run.strategy == "streamed" else []
    states = [] if shared else _states(shape, run)
    parts = [*states, *_activations(shape, run), _logits(shape, run)]
    if run.device == "cpu":
        each = [*parts, ("context", CONTEXT_BYTES, "0.5 GiB: interpreter and libraries")]
        note = f", x {run.workers} workers" if run.workers > 1 else ""
        items = [_item("host", *part) for part in shared]
        items += [_item("host", part, size * run.workers, formula + note) for part, size, formula in each]
    else:
        context = CONTEXT_BYTES + (COMMUNICATION_BYTES if run.workers > 1 else 0)
        parts.append(("context", context, "0.5 GiB of CUDA" + (" + 0.5 GiB of NCCL" if run.workers > 1 else "")))
        items = [_item("card", *part) for part in parts]
        items.append(_item("host", "context", HOST_PROCESS_BYTES * run.workers, f"2 GiB x {run.workers} workers"))
    return Ledger(items=tuple(item for item in items if item.size_bytes))


def _item(place: Literal["card", "host"], part: str, size: float, formula: str) -> LedgerItem:
    return LedgerItem(part=part, place=place, size_bytes=round(size), formula=formula)


def _states(shape: ModelShape, run: Footprint) -> list[Part]:
    if run.adapter.trains:
        return _adapted(shape, run)
    if run.strategy == "resident":
        return _resident(shape, run)
    return _sharded(shape, run)


def _rest(shape: ModelShape) -> int:
    """Parameters outside the blocks: embedding, head, last norm."""
    return shape.outside_blocks


def _resident(shape: ModelShape, run: Footprint) -> list[Part]:
    master, compute = run.bytes_of
    parameters = shape.parameters
    moments: Part = ("moments", 2 * master * parameters, f"2 x {master} bytes x parameters")
    gradients: Part = ("gradients", master * parameters, f"{master} bytes x parameters, summed over micro-batches")
    if master == compute:
        return [("parameters", master * parameters, f"{master} bytes x parameters"), gradients, moments]
    unit = max(shape.block_parameters, _rest(shape))
    return [
        ("parameters", compute * parameters, f"{compute} bytes x parameters"),
        ("master", master * parameters, f"{master} bytes x parameters"),
        gradients,
        moments,
        ("workspace", compute * unit, f"{compute} bytes x largest block: its gradient before it is added to the sums"),
    ]


def _sharded(shape: ModelShape, run: Footprint) -> list[Part]:
    master, compute = run.bytes_of
    parameters, block, rest, n = shape.parameters, shape.block_parameters, _rest(shape), run.workers
    unit = max(block, rest)
    shard = master * parameters / n
    whole_gradients = run.strategy == "zero1" and run.rounds > 1
    gradients = shard + (master * parameters if whole_gradients else 0)
    how = f"{master} bytes x parameters / {n}" + (
        f" + {master} bytes x parameters until the last micro-batch" if whole_gradients else ""
    )
    return [
        _gathered(shape, run),
        ("master", shard, f"{master} bytes x parameters / {n}"),
        ("gradients", gradients, how),
        ("moments", 2 * shard, f"2 x {master} bytes x parameters / {n}"),
        (
            "workspace",
            (compute + master) * unit,
            f"{compute + master} bytes x largest block: its gradient while it is scattered",
        ),
    ]


def _gathered(shape: ModelShape, run: Footprint) -> Part:
    compute = run.bytes_of[1]
    if run.strategy != "zero3":
        return ("parameters", compute * shape.parameters, f"{compute} bytes x parameters, gathered")
    size = compute * (2 * shape.block_parameters + _rest(shape))
    return ("parameters", size, f"{compute} bytes x (2 blocks + embedding and head), gathered")


def _streamed(shape: ModelShape, run: Footprint) -> list[Part]:
    if run.adapter.trains:
        return _frozen_streamed(shape, run)
    master, compute = run.bytes_of
    parameters = shape.parameters
    state = state_bytes_of(run.compute, run.streaming.moments, run.streaming.gradients)
    working: list[Part] = []
    if master != compute:
        working = [("parameters", compute * parameters, f"{compute} bytes x parameters")]
    slots, note = (
        SLOTS * compute * shape.block_parameters * run.workers,
        f", x {run.workers} workers" if run.workers > 1 else "",
    )
    rings: list[Part] = []
    if run.workers > 1:
        size = run.streaming.ring * shape.block_parameters + _rest(shape)
        rings = [
            (
                "rings",
                run.workers * state.gradient * size,
                f"{state.gradient} bytes x ({run.streaming.ring} blocks + rest){note}",
            )
        ]
    return [
        *working,
        ("master", master * parameters, f"{master} bytes x parameters"),
        ("gradients", state.gradient * parameters, f"{state.gradient} bytes x parameters"),
        ("moments", state.moments * parameters, f"{state.moments:g} bytes x parameters, both"),
        ("slots", slots, f"{SLOTS} x {compute} bytes x a block's parameters{note}"),
        *rings,
    ]


def _frozen_streamed(shape: ModelShape, run: Footprint) -> list[Part]:
    """Of all workers together, as above: the model is there once."""
    compute, n = run.bytes_of[1], run.workers
    note = f", x {n} workers" if n > 1 else ""
    state, how = adapter_state(run)
    shared = exchanged_adapters(run)
    return [
        ("parameters", compute * shape.parameters, f"{compute} bytes x parameters, frozen"),
        ("adapter", state * n, how + note),
        *([("adapter exchange", *shared)] if n > 1 else []),
        ("slots", SLOTS * compute * shape.block_parameters * n, f"{SLOTS} x {compute} bytes x a block's parameters{note}"),
    ]


def _adapted(shape: ModelShape, run: Footprint) -> list[Part]:
    master, compute = run.bytes_of
    parameters, n = shape.parameters, run.workers
    if run.strategy == "resident":
        return [
            ("parameters", compute * parameters, f"{compute} bytes x parameters, frozen"),
            ("adapter", *adapter_state(run)),
        ]
    adapter = run.adapter.parameters
    whole = master * adapter if run.strategy == "zero1" and run.rounds > 1 else 0
    return [
        _gathered(shape, run),
        ("shards", compute * parameters / n, f"{compute} bytes x parameters / {n}, frozen"),
        (
            "adapter",
            compute * adapter + whole + 4 * master * adapter / n,
            f"{4 * master} bytes x {adapter} / {n}, and gathered",
        ),
    ]


def _activations(shape: ModelShape, run: Footprint) -> list[Part]:
    block = block_activations(shape, run)
    if run.streaming.activations and run.strategy == "streamed":
        kept = sum(policy != "recompute" for policy in run.streaming.activations)
        wave = -(-run.rounds // min(run.streaming.waves, run.rounds))
        text = f"{run.tokens} tokens x ({kept} blocks x {wave} micro-batches of a wave + one)"
        return [("activations", (kept * wave + 1) * block, text)]
    if run.activations == "keep":
        return [("activations", shape.layers * block, f"{run.tokens} tokens x {shape.layers} blocks, all kept")]
    kept = run.rounds if run.strategy == "streamed" else 1  # streamed runs all micro-batches through a block before the next
    inputs = run.bytes_of[1] * shape.hidden * run.tokens * shape.layers * kept
    return [("activations", inputs + block, f"inputs of {shape.layers} blocks, {kept * run.tokens} tokens + one whole block")]


def _logits(shape: ModelShape, run: Footprint) -> Part:
    chunk, size = min(run.loss_chunk, run.tokens), 24 if run.compute == "fp64" else 12
    return ("logits", size * chunk * shape.vocab, f"{size} bytes x {chunk} tokens x {shape.vocab} words")
