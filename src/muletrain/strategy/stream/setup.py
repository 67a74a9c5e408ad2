"""Takes a model apart into units and puts the streamed strategy's pieces together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from muletrain.models.build import materialize_buffers
from muletrain.models.causal import CausalModel, canonical_name
from muletrain.optim.flat import FlatLayout, StateFormat, state_bytes
from muletrain.precision.policy import Precision
from muletrain.schedule.layout import Layout
from muletrain.schedule.ops import StreamPlan, UnitShape
from muletrain.spec.plan import StreamingPlan
from muletrain.strategy.materials import Materials
from muletrain.strategy.stream.adapter import CardAdapter, FrozenUnit, frozen_bytes
from muletrain.strategy.stream.arena import HostArena, padded_bytes
from muletrain.strategy.stream.device import Device, Slot
from muletrain.strategy.stream.exchange import Exchange, shared_bytes, slice_units
from muletrain.strategy.stream.proxy import LayerProxy, RunBlock, Stage
from muletrain.strategy.stream.shared import Team
from muletrain.strategy.stream.unit import Formats, HostUnit, kind_of, unit_bytes

Named = list[tuple[str, nn.Parameter]]
Unit = HostUnit | FrozenUnit


@dataclass(frozen=True)
class Blocks:
    """How blocks run."""

    prepare: Callable[[nn.Module], None]
    """Makes a block compute itself again in backward, in place."""
    keep: Callable[[nn.Module], Callable[..., Any]]
    """The same block, keeping instead; to be asked before `prepare`."""


@dataclass
class Built:
    """The pieces of one streamed strategy."""

    device: Device
    stage: Stage
    unit_of: dict[str, HostUnit]
    norm_places: list[Tensor]
    """By unit: where its parameters' norms go, in the order in which the model names its parameters."""
    arenas: list[HostArena] = field(default_factory=list)
    exchange: Exchange | None = None
    """With the other workers, if there are any."""
    input_room: tuple[int, int] = (0, 0)
    """(elements a micro-batch, micro-batches) that there is room for on the host."""

    offload_room: tuple[int, int] = (0, 0)
    """The same of what blocks save and send: (tokens, micro-batches)."""

    def has_offload_room(self, tokens: int, positions: int) -> bool:
        """For `positions` micro-batches of `tokens`."""
        return tokens <= self.offload_room[0] and positions <= self.offload_room[1]

    def make_offload_room(self, tokens: int, positions: int, saved: dict[int, int]) -> None:
        """`saved`: {kind of block: bytes that it saves of a micro-batch of `tokens`}; grows only."""
        self.offload_room = (max(tokens, self.offload_room[0]), max(positions, self.offload_room[1]))
        plan = self.device.plan
        positions = -(-self.offload_room[1] // plan.offload_every)
        sizes = {u: saved[plan.units[u].kind] for u, policy in enumerate(plan.activations) if policy == "offload"}
        size = positions * sum(padded_bytes(each, torch.uint8) for each in sizes.values())
        arena = HostArena(size, register=self.device.slots[0].flat.is_cuda)
        self.arenas.append(arena)
        self.device.offload.place(sizes, positions, arena.take)

    def ensure_inputs(self, tokens: int, positions: int) -> None:
        """Room on the host for the inputs of `positions` micro-batches of `tokens`; grows only."""
        elements = tokens * self.device.plan.hidden
        if elements <= self.input_room[0] and positions <= self.input_room[1]:
            return
        self.input_room = (max(elements, self.input_room[0]), max(positions, self.input_room[1]))
        elements, positions = self.input_room
        dtype = self.device.slots[0].flat.dtype
        size = max(0, len(self.device.units) - 3) * padded_bytes(elements * positions, dtype)
        arena = HostArena(size, register=self.device.slots[0].flat.is_cuda)
        self.arenas.append(arena)
        self.device.place_inputs(elements, positions, arena.take)


def assemble(materials: Materials, how: Blocks, streaming: StreamingPlan, seed: int, run_layer: RunBlock) -> Built:
    """Host memory first (there may be too little), then weights, slots and device buffers. Replaces the model's layers."""
    model, precision, device = materials.model.to(materials.precision.compute), materials.precision, materials.device
    state = StateFormat.of(streaming.moments, precision.master, precision.split)
    gradient = precision.master if streaming.gradients == "master" else torch.bfloat16
    formats = Formats(precision, state, gradient)
    blocks, places = list(model.layers), _places(model)
    held = _hold(materials, formats, streaming, seed)
    units, adapter, team = held.units, held.adapter, held.team
    plan = _plan(model, units, blocks, formats, streaming)
    if team and adapter is None:
        plan = slice_units(plan, units, streaming, team)
    stage = Stage(run_layer)
    for number, block in enumerate(blocks):
        model.layers[number] = LayerProxy(stage, number, number == len(blocks) - 1, block)
    model.to_empty(device=device)
    materialize_buffers(model, device)
    slots = _slots(plan, units, blocks, precision, device, how, adapter)
    for number in (0, len(units) - 1):
        slots.insert(number, _outer_slot(model, units[number], device, precision))
    on_device = Device(plan, units, slots, formats, materials.updater.optimizer, seed, device)
    on_device.adapter = adapter
    if model.tied and adapter is None:
        on_device.shared = slots[0].parameters[:1]
    trains = units if adapter is None else [adapter.unit]
    unit_of = {segment.name: unit for unit in trains for segment in unit.layout.segments}
    norm_places = [torch.tensor([places[segment.name] for segment in unit.layout.segments], device=device) for unit in units]
    exchange = None
    if team and adapter is None:
        exchange = Exchange(on_device, team, held.arena.take, materials.meter, formats)
    elif team and adapter:
        adapter.share(team, held.arena.take, materials.meter)
    return Built(on_device, stage, unit_of, norm_places, [held.arena], exchange)


@dataclass
class _Held:
    """What a model's parameters became."""

    units: list[Unit]
    arena: HostArena
    team: Team | None
    """The workers of the box, if there are several."""
    adapter: CardAdapter | None
    """What is trained, if the units are frozen."""


def _hold(materials: Materials, formats: Formats, streaming: StreamingPlan, seed: int) -> _Held:
    """Maps host memory and fills the units. Of several workers each fills some, for all: others' may not be there yet."""
    named, worker, workers = _units(materials.model), materials.worker, materials.workers
    stored = streaming.update == "next_fetch" or streaming.waves > 1
    here, adapter = partial(_on_device, materials.device), None
    if any(not parameter.requires_grad for part in named for _, parameter in part):
        trained = [[pair for pair in part if pair[1].requires_grad] for part in named[1:-1]]
        named = [[pair for pair in part if not pair[1].requires_grad] for part in named]
        adapter = CardAdapter(trained, formats, materials.updater.optimizer, seed, streaming.piece, here)
        adapter.unit.fill(materials.weights)
        sizes = [frozen_bytes(part, formats.precision.compute, padded_bytes) for part in named]
        exchanged = adapter.shared_bytes(workers)
    else:
        sizes = [unit_bytes(part, formats, padded_bytes, stored) for part in named]
        exchanged = shared_bytes(named, formats, streaming, workers)
    size, register = (
        sum(s for number, s in enumerate(sizes) if number not in streaming.on_card),
        materials.device.type == "cuda",
    )
    team = Team(worker, workers) if workers > 1 else None
    arena = HostArena(size, register) if team is None else team.map(size + exchanged, register)
    units: list[Unit] = []
    for number, part in enumerate(named):
        on_card = number in streaming.on_card
        take = here if on_card else arena.take
        if adapter is not None:
            units.append(FrozenUnit(number, part, formats.precision.compute, take, on_card))
        else:
            unit = HostUnit(number, part, formats, take, streaming.piece, on_card, stored)
            if on_card and team:
                unit.gradient = arena.take(unit.layout.size, formats.gradient)
            units.append(unit)
        if team is None or on_card or number % workers == worker:
            units[-1].fill(materials.weights)
    return _Held(units, arena, team, adapter)


def _on_device(device: torch.device, count: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(count, dtype=dtype, device=device)


def _places(model: CausalModel) -> dict[str, int]:
    return {canonical_name(name): number for number, (name, _) in enumerate(model.named_parameters())}


def _units(model: CausalModel) -> list[Named]:
    """Parameters by unit: embedding, blocks, head.

    The head's unit is what runs after the last block: the output embedding, unless the input embedding is used again, and what
    the decoder holds behind its list of layers (the final norm). All else outside of blocks runs before the first.
    """
    unit_of = {id(p): number + 1 for number, block in enumerate(model.layers) for p in block.parameters()}
    last = len(model.layers) + 1
    owner = next(module for module in model.modules() if any(child is model.layers for child in module.children()))
    children = list(owner.children())
    behind = children[next(n for n, child in enumerate(children) if child is model.layers) + 1 :]
    embedding = {id(p) for p in model.hf.get_input_embeddings().parameters()}
    for module in (*behind, model.head):
        unit_of.update((id(p), last) for p in module.parameters() if id(p) not in embedding)
    units: list[Named] = [[] for _ in range(last + 1)]
    for name, parameter in model.named_parameters():
        units[unit_of.get(id(parameter), 0)].append((canonical_name(name), parameter))
    units[0].sort(key=lambda pair: id(pair[1]) not in embedding)  # the one that a tied head shares comes first
    return units


def _plan(
    model: CausalModel, units: Sequence[Unit], blocks: Sequence[nn.Module], formats: Formats, streaming: StreamingPlan
) -> StreamPlan:
    up, down = state_bytes(formats.state, formats.gradient)
    working = formats.precision.compute.itemsize
    kinds = ["first", *(kind_of(block) for block in blocks), "last"]
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    shapes = tuple(
        UnitShape(
            parameters=unit.layout.size,
            trainable=isinstance(unit, HostUnit),
            kind=numbers[kind],
            pieces=tuple(piece.size for piece in unit.pieces),
            forward_flops_a_token=2.0 * unit.layout.size if unit.number else 0.0,
            kept_bytes_a_token=0,
        )
        for unit, kind in zip(units, kinds, strict=True)
    )
    return StreamPlan(
        units=shapes,
        hidden=model.config.hidden_size,
        slots=streaming.slots,
        staging=streaming.staging,
        waves=streaming.waves,
        working_bytes=working,
        state_up_bytes=up,
        state_down_bytes=down + (working if formats.own_working else 0),
        gradient_bytes=formats.gradient.itemsize,
        activations=("recompute", *(streaming.activations or ["recompute"] * len(blocks)), "recompute"),
        inputs=streaming.inputs,
        offload_every=streaming.offload_every,
        update=streaming.update,
        working_in_master=not formats.own_working,
        placement=tuple("card" if number in streaming.on_card else "streamed" for number in range(len(units))),
    )


def _slots(
    plan: StreamPlan,
    units: Sequence[Unit],
    blocks: Sequence[nn.Module],
    precision: Precision,
    device: torch.device,
    how: Blocks,
    adapter: CardAdapter | None,
) -> list[Slot]:
    """By block: the slot that it always uses."""
    made: dict[tuple[int, ...], Slot] = {}
    slots = []
    layout = Layout(plan)
    for number, block in enumerate(blocks, start=1):
        index = layout.slots[number][0].index[:2]
        if index not in made:
            module = copy.deepcopy(block).to_empty(device=device)
            prefix = _common_prefix(units[number])
            slot = _views(module, units[number], prefix, device, precision)
            slot.module = module
            if adapter is not None:
                _adapter_views(slot, adapter, number, prefix)
            materialize_buffers(module, device)
            slot.kept = how.keep(module)
            how.prepare(module)
            made[index] = slot
        slots.append(made[index])
    return slots


def _outer_slot(model: CausalModel, unit: Unit, device: torch.device, precision: Precision) -> Slot:
    tied = model.tied
    slot = _views(model.hf, unit, "", device, precision)
    if tied and unit.number == 0:
        model.tie_weights()
    return slot


def _views(module: nn.Module, unit: Unit, prefix: str, device: torch.device, precision: Precision) -> Slot:
    """Makes the unit's parameters in `module` views of one flat buffer, with version counters of their own."""
    flat = unit.working if unit.on_card else torch.zeros(unit.layout.size, dtype=precision.compute, device=device)
    trains = isinstance(unit, HostUnit)
    parameters = _bind(module, unit.layout, flat, prefix, trains)
    return Slot(flat, parameters if trains else [], None)


def _adapter_views(slot: Slot, adapter: CardAdapter, number: int, prefix: str) -> None:
    """Makes the adapter's parameters in the slot's module views of a buffer that any block's part of it fits in."""
    assert slot.module is not None
    slot.adapter = torch.zeros_like(adapter.working(number))
    slot.parameters = _bind(slot.module, adapter.layouts[number - 1], slot.adapter, prefix, trains=True)


def _bind(module: nn.Module, layout: FlatLayout, flat: Tensor, prefix: str, trains: bool) -> list[nn.Parameter]:
    parameters = []
    for segment in layout.segments:
        owner, _, leaf = segment.name.removeprefix(prefix).rpartition(".")
        parameter = nn.Parameter(segment.of(flat).data, requires_grad=trains)
        setattr(module.get_submodule(owner), leaf, parameter)
        parameters.append(parameter)
    return parameters


def _common_prefix(unit: Unit) -> str:
    """ "model.layers.3." of a block's parameters: the names up to and with the block's number."""
    parts = unit.layout.segments[0].name.split(".")
    depth = next(n for n, part in enumerate(parts) if part == str(unit.number - 1))
    return ".".join(parts[: depth + 1]) + "."
