"""The compute ops of a streamed step: one micro-batch through one unit, forward or back.

Between units only their inputs are kept, with the edge of each block's graph; the graph itself holds what the block's
activation policy lets it hold. Gradients come from torch.autograd.grad on explicit tensors, so nothing hangs on `.grad` fields,
and they are added in the order in which one backward through the whole model adds them: the sums have the resident strategy's
bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from muletrain.data.batch import MicroBatch
from muletrain.models.causal import CausalModel
from muletrain.schedule.ops import Op
from muletrain.strategy.randomness import PROLOGUE, KeyedRandom
from muletrain.strategy.stream.device import Device
from muletrain.strategy.stream.offload import Saved, bytes_of, gathering
from muletrain.strategy.stream.proxy import Call, Captured, Stage, hidden_of


@dataclass
class Work:
    """What one step's compute ops hand to each other, by micro-batch."""

    batches: Sequence[MicroBatch]
    window: int
    training: bool
    random: KeyedRandom
    factor: float
    """What gradients are multiplied by: the loss scale's."""
    loss_sum: Tensor
    prologues: dict[int, Captured] = field(default_factory=dict)
    hidden: dict[int, Tensor] = field(default_factory=dict)
    """The latest unit's output."""
    graphs: dict[tuple[int, int], tuple[Tensor, GradientEdge]] = field(default_factory=dict)
    """(unit, micro-batch) -> the unit's input and the root of its graph."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """Of the loss with respect to the latest unit's output."""
    shared: dict[int, Tensor] = field(default_factory=dict)
    """The head's gradient of a weight it shares with the embedding, until the prologue's is there. One a micro-batch of the
    wave: one backward through the whole model adds the two before it adds the pair to the sum, and sums have its bits."""


class Compute:
    """Handlers of forward, epilogue, backward and norm."""

    def __init__(self, model: CausalModel, device: Device, stage: Stage) -> None:
        self._model, self._device, self._stage = model, device, stage
        self._head = len(device.units) - 1

    def _run_block(self, unit: int, hidden: Tensor, call: Call, random: KeyedRandom) -> Any:
        """The block's raw output; its parameters must be in its slot."""
        slot = self._device.slots[unit]
        assert slot.module is not None
        self._device.place_adapter(unit)
        slot.module.train(self._model.training)
        random.enter(unit - 1)
        return slot.module(hidden, *call.args, **call.kwargs)

    def forward(self, op: Op, work: Work) -> None:
        """One micro-batch through the prologue or a block."""
        batch = work.batches[op.micro_batch]
        work.random.at(work.window, batch.index)
        with torch.set_grad_enabled(work.training):
            if op.unit == 0:
                work.prologues[op.micro_batch] = captured = self._prologue(batch, work.random)
                output = captured.hidden
            else:
                hidden = work.hidden[op.micro_batch].requires_grad_(work.training)
                call = work.prologues[op.micro_batch].calls[op.unit - 1]
                output = self._run_by_policy(op, hidden, call, work)
                if work.training:
                    work.graphs[op.unit, op.micro_batch] = (hidden, get_gradient_edge(output))
        work.hidden[op.micro_batch] = self._device.keep_input(op, output.detach())

    def _run_by_policy(self, op: Op, hidden: Tensor, call: Call, work: Work) -> Tensor:
        """The block's output, with a graph that holds what its policy says."""
        slot, policy = self._device.slots[op.unit], self._device.plan.policy(op.unit, op.micro_batch)
        if policy == "recompute" or not work.training:
            return hidden_of(self._run_block(op.unit, hidden, call, work.random))
        if policy == "keep":
            return self._run_keeping(op.unit, hidden, call, work.random)
        saved = Saved()
        with gathering(saved, (slot.flat, slot.adapter, hidden, call.args, call.kwargs)):
            output = self._run_keeping(op.unit, hidden, call, work.random)
        self._device.offload.called(op.unit, op.micro_batch, saved)
        return output

    def _run_keeping(self, unit: int, hidden: Tensor, call: Call, random: KeyedRandom) -> Tensor:
        slot = self._device.slots[unit]
        assert slot.kept is not None and slot.module is not None
        self._device.place_adapter(unit)
        slot.module.train(self._model.training)
        random.enter(unit - 1)
        return hidden_of(slot.kept(hidden, *call.args, **call.kwargs))

    def saved_bytes(self, unit: int, batch: MicroBatch, work: Work) -> int:
        """What a block saves of a micro-batch and may be sent; its parameters must be in its slot."""
        saved, slot = Saved(), self._device.slots[unit]
        captured = self._prologue(batch, KeyedRandom(0, enabled=False))
        hidden, call = captured.hidden.detach().requires_grad_(), captured.calls[unit - 1]
        with gathering(saved, (slot.flat, slot.adapter, hidden, call.args, call.kwargs)):
            self._run_keeping(unit, hidden, call, work.random)
        return bytes_of(saved)

    def _prologue(self, batch: MicroBatch, random: KeyedRandom) -> Captured:
        stage = self._stage
        stage.mode = "capture"
        random.enter(PROLOGUE)
        self._model.hidden_states(batch.input_ids, batch.position_ids, batch.cu_seqlens, batch.max_seqlen)
        assert stage.first is not None
        return Captured(stage.first, stage.calls)

    def epilogue(self, op: Op, work: Work) -> None:
        """Final norm, head and loss; in training their gradients too."""
        m, stage, batch = op.micro_batch, self._stage, work.batches[op.micro_batch]
        final = work.hidden.pop(m).requires_grad_(work.training)
        stage.mode, stage.final = "replay", final
        with torch.set_grad_enabled(work.training):
            hidden = self._model.hidden_states(batch.input_ids, batch.position_ids, batch.cu_seqlens, batch.max_seqlen)
            loss = self._model.head_loss(hidden, batch.labels, work.factor)
        stage.mode, stage.final = "run", None
        work.loss_sum += loss.detach()
        if not work.training:
            return
        own, shared = self._device.slots[self._head].parameters, self._device.shared
        work.gradients[m], *grads = torch.autograd.grad(loss, [final, *own, *shared])
        self._device.add_gradients(op, grads[: len(own)])
        if shared:
            work.shared[m] = grads[-1]

    def backward(self, op: Op, work: Work) -> None:
        """One micro-batch back through a block or the prologue."""
        m, parameters = op.micro_batch, self._device.slots[op.unit].parameters
        if op.unit == 0:
            root: Any = work.prologues.pop(m).hidden
            grads = list(torch.autograd.grad(root, parameters, work.gradients.pop(m)))
            if self._device.shared:  # the embedding's first parameter
                grads[0] = grads[0] + work.shared.pop(m)
        else:
            x, edge = work.graphs.pop((op.unit, m))
            self._device.place_adapter(op.unit)
            gradient, *grads = torch.autograd.grad([edge], [x, *parameters], [work.gradients[m]])
            work.gradients[m] = self._device.offload.apart(gradient)
        self._device.add_gradients(op, grads)
