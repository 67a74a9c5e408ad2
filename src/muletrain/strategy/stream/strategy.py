"""streamed: a step goes through the model block by block, all micro-batches through one block before the next.

  prologue of each micro-batch | blocks, fetched one at a time | epilogue of each | blocks in reverse | prologue backward

Only one block's activations are alive at a time: between blocks just their inputs are kept, and a block's own graph is computed
again in its backward. Gradients come from torch.autograd.grad on explicit tensors, so nothing hangs on `.grad` fields and the
order in which they are added is the resident strategy's: the two give the same bits. This version runs on a CPU with one
worker; embedding, final norm and head stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from muletrain.data.batch import MicroBatch
from muletrain.metrics.memory import peak_memory_bytes
from muletrain.models.build import materialize_buffers
from muletrain.models.causal import canonical_name
from muletrain.models.weights import WeightSource
from muletrain.precision.policy import Precision
from muletrain.strategy.contract import StepContext, StepResult
from muletrain.strategy.forward import evaluate
from muletrain.strategy.materials import Materials
from muletrain.strategy.parts import StepParts
from muletrain.strategy.place import by_kind, place_parameter, round_masters
from muletrain.strategy.randomness import PROLOGUE, KeyedRandom
from muletrain.strategy.stream.blocks import SLOTS, HostBlock, Slot
from muletrain.strategy.stream.proxy import Call, Captured, LayerProxy, Stage, hidden_of
from muletrain.strategy.update import square_norm


class StreamedStrategy:
    """See strategy.contract.Strategy."""

    def __init__(self, materials: Materials, prepare: Callable[[nn.Module], None]) -> None:
        m = materials
        model, weights, device, precision = m.model, m.weights, m.device, m.precision
        self._model, self._device, self._random = model, device, m.random
        self._updater, self._meter = m.updater, m.meter
        model.to(precision.compute)
        names = [canonical_name(name) for name, _ in model.named_parameters()]
        self._stage = Stage(self._run_block)
        self._blocks: list[HostBlock] = []
        self._slots: dict[tuple[str, int], Slot] = {}
        self._take_blocks(weights, precision, prepare)
        model.to_empty(device=device)
        materialize_buffers(model, device)
        outer = [(canonical_name(name), p) for name, p in model.named_parameters()]
        self._outer = [p for _, p in outer]
        outer_states = [place_parameter(name, p, weights, precision) for name, p in outer]
        self._outer_sums = {p: torch.zeros_like(p, dtype=precision.master, requires_grad=False) for p in self._outer}
        states = {s.name: s for s in [*outer_states, *(s for block in self._blocks for s in block.states())]}
        sums = {name: self._outer_sums[p] for name, p in outer}
        for block in self._blocks:
            sums.update((block.prefix + s.name, g) for s, g in zip(block.segments, block.gradients(), strict=True))
        self._states = [states[name] for name in names]
        self._sums = [sums[name] for name in names]

    def _take_blocks(self, weights: WeightSource, precision: Precision, prepare: Callable[[nn.Module], None]) -> None:
        layers = self._model.layers
        prefix = next(canonical_name(name) for name, module in self._model.named_modules() if module is layers)
        for number, layer in enumerate(layers):
            block = HostBlock(f"{prefix}.{number}.", layer, precision)
            block.fill(weights)
            self._blocks.append(block)
            place = (block.kind, number % SLOTS)
            if place not in self._slots:
                self._slots[place] = Slot(layer, self._device, precision, prepare)
            layers[number] = LayerProxy(self._stage, number, number == len(layers) - 1, layer)

    def _slot(self, layer: int) -> Slot:
        block = self._blocks[layer]
        slot = self._slots[block.kind, layer % SLOTS]
        slot.fetch(block)
        return slot

    def _run_block(self, layer: int, hidden: Tensor, call: Call) -> Any:
        slot = self._slot(layer)
        slot.module.train(self._model.training)
        self._random.enter(layer)
        return slot.module(hidden, *call.args, **call.kwargs)

    def step(self, micro_batches: Sequence[MicroBatch], context: StepContext) -> StepResult:
        """One update over this worker's micro-batches."""
        parts = StepParts(self._device, self._meter)
        total = self._accumulate(micro_batches, context.window)
        parts.end("compute")
        squares = square_norm(self._sums)
        decision = self._updater.decide(total, sum(b.tokens for b in micro_batches), squares, context)
        self._updater.apply(self._states, self._sums, decision)
        self._release()
        parts.end("update")
        return self._updater.result(decision, parts.seconds)

    def _release(self) -> None:
        for slot in self._slots.values():
            slot.release()

    def _accumulate(self, micro_batches: Sequence[MicroBatch], window: int) -> Tensor:
        """Gradient sums of the step in self._sums; returns the loss sum."""
        batches = [batch.to(self._device) for batch in micro_batches]
        prologues = [self._prologue(batch, window) for batch in batches]
        inputs, outputs = self._forward(batches, prologues, window)
        for total in self._outer_sums.values():
            total.zero_()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        gradients, head_grads = [], []
        for number, batch in enumerate(batches):
            final = outputs[-1][number].detach().requires_grad_()
            loss = self._epilogue(batch, final)
            loss_sum += loss.detach()
            gradient, *rest = torch.autograd.grad(loss, [final, *self._outer], allow_unused=True)
            gradients.append(gradient)
            head_grads.append(rest)
        gradients = self._backward(inputs, outputs, gradients)
        self._finish_outer(prologues, gradients, head_grads)
        return loss_sum

    def _prologue(self, batch: MicroBatch, window: int) -> Captured:
        self._stage.mode = "capture"
        self._random.at(window, batch.index)
        self._random.enter(PROLOGUE)
        self._model.hidden_states(batch.input_ids, batch.position_ids, batch.cu_seqlens, batch.max_seqlen)
        assert self._stage.first is not None
        return Captured(self._stage.first, self._stage.calls)

    def _forward(
        self, batches: Sequence[MicroBatch], prologues: Sequence[Captured], window: int
    ) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Inputs and outputs [layer][micro-batch]; an output carries its block's graph, which holds little but the input."""
        inputs, outputs = [], []
        hidden = [captured.hidden for captured in prologues]
        for layer in range(len(self._blocks)):
            inputs.append([h.detach().requires_grad_() for h in hidden])
            hidden = []
            for batch, captured, h in zip(batches, prologues, inputs[-1], strict=True):
                self._random.at(window, batch.index)
                hidden.append(hidden_of(self._run_block(layer, h, captured.calls[layer])))
            outputs.append(hidden)
        return inputs, outputs

    def _epilogue(self, batch: MicroBatch, final: Tensor) -> Tensor:
        self._stage.mode, self._stage.final = "replay", final
        hidden = self._model.hidden_states(batch.input_ids, batch.position_ids, batch.cu_seqlens, batch.max_seqlen)
        self._stage.mode, self._stage.final = "run", None
        return self._model.head_loss(hidden, batch.labels, self._updater.scaler.factor)

    def _backward(self, inputs: list[list[Tensor]], outputs: list[list[Tensor]], gradients: list[Tensor]) -> list[Tensor]:
        for layer in reversed(range(len(self._blocks))):
            slot = self._slot(layer)
            layer_inputs, layer_outputs = inputs.pop(), outputs.pop()
            for number, (x, y) in enumerate(zip(layer_inputs, layer_outputs, strict=True)):
                gradients[number], *grads = torch.autograd.grad(y, [x, *slot.parameters], gradients[number])
                slot.add(tuple(grads), first=number == 0)
            slot.store(self._blocks[layer])
        return gradients

    def _finish_outer(
        self, prologues: Sequence[Captured], gradients: Sequence[Tensor], head_grads: Sequence[Sequence[Tensor | None]]
    ) -> None:
        """Adds the gradients of embedding, norm and head micro-batch by micro-batch, both uses of a tied weight together.

        That is the order in which one backward through the whole model adds them, so the sums have the same bits.
        """
        for captured, gradient, after in zip(prologues, gradients, head_grads, strict=True):
            before = torch.autograd.grad(captured.hidden, self._outer, gradient, allow_unused=True)
            for parameter, first, second in zip(self._outer, before, after, strict=True):
                both = [grad for grad in (first, second) if grad is not None]
                if both:
                    self._outer_sums[parameter].add_(both[0] + both[1] if len(both) == 2 else both[0])

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, int]:
        """(loss sum, tokens) over all workers."""
        self._stage.mode = "run"
        random, self._random = self._random, KeyedRandom(0, enabled=False)
        result = evaluate(self._model, micro_batches, self._device, self._updater)
        self._random = random
        return result

    def warm_up(self, micro_batch: MicroBatch) -> None:
        """Forward and backward of one batch, forgotten."""
        self._accumulate([micro_batch], window=0)

    def flush(self) -> None:
        """Updates are applied within the step: nothing is pending."""

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Live views of the host arrays."""
        return by_kind(self._states)

    def state_scalars(self) -> dict[str, Any]:
        """The loss scale."""
        return self._updater.scaler.state()

    def loaded(self, scalars: dict[str, Any]) -> None:
        """Rounds the masters into the working copies; what slots hold is out of date."""
        self._updater.scaler.load(scalars)
        round_masters(self._states)
        self._release()

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Whole master weights, one at a time."""
        for state in self._states:
            yield state.name, state.master.detach().cpu()

    def peak_memory_bytes(self) -> int:
        """Peak of this worker."""
        return peak_memory_bytes(self._device.type)
