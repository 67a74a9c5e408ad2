"""resident: everything on the card. One worker, or plain data parallel over several.

The model holds parameters in the compute dtype; where that is bf16 or fp16 a master copy sits beside them and the optimizer
writes the rounded working copy in the same pass; frozen weights have the working copy alone. So no cast of the weights happens
in a step. It is also the ceiling that the streamed strategy is measured against, with the same model code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from muletrain.data.batch import MicroBatch
from muletrain.metrics.memory import peak_memory_bytes
from muletrain.models.build import materialize_buffers
from muletrain.models.causal import canonical_name
from muletrain.strategy.contract import Narrow, StepContext, StepResult
from muletrain.strategy.forward import evaluate, loss_sum
from muletrain.strategy.gradients import GradientSums
from muletrain.strategy.materials import Materials
from muletrain.strategy.parts import StepParts
from muletrain.strategy.place import by_kind, place_frozen, place_parameter, round_masters
from muletrain.strategy.update import square_norm


class ResidentStrategy:
    """See strategy.contract.Strategy."""

    def __init__(self, materials: Materials) -> None:
        m = materials
        self._model, self._device, self._random = m.model, m.device, m.random
        self._updater, self._meter = m.updater, m.meter
        self._first_worker = m.worker == 0
        model = m.model
        model.to(m.precision.compute).to_empty(device=m.device)
        materialize_buffers(model, m.device)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                place_frozen(canonical_name(name), parameter, m.weights)
        self._states = [place_parameter(canonical_name(name), p, m.weights, m.precision) for name, p in named]
        blocks = [[p for p in layer.parameters() if p.requires_grad] for layer in model.layers]
        in_blocks = {id(p) for block in blocks for p in block}
        rest = [p for _, p in named if id(p) not in in_blocks]
        groups = [group for group in (*blocks, rest) if group]
        self._sums = GradientSums(groups, m.precision.master, m.workers, m.meter)
        self._grads = [self._sums.grads[parameter] for _, parameter in named]

    def step(self, micro_batches: Sequence[MicroBatch], context: StepContext) -> StepResult:
        """One update over this worker's micro-batches."""
        parts = StepParts(self._device, self._meter)
        total = self._accumulate(micro_batches, context.window)
        parts.end("compute")
        squares = square_norm(self._grads) * (1.0 if self._first_worker else 0.0)
        decision = self._updater.decide(total, sum(b.tokens for b in micro_batches), squares, context)
        self._updater.apply(self._states, self._grads, decision)
        self._sums.zero()
        parts.end("update")
        return self._updater.result(decision, parts.seconds)

    def _accumulate(self, micro_batches: Sequence[MicroBatch], window: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for number, batch in enumerate(micro_batches):
            loss = loss_sum(self._model, batch, self._device, self._random, window, self._updater.scaler.factor)
            self._sums.begin(last=number == len(micro_batches) - 1)
            loss.backward()
            total += loss.detach()
        self._sums.finish()
        return total

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, int]:
        """(loss sum, tokens) over all workers."""
        return evaluate(self._model, micro_batches, self._device, self._updater)

    def warm_up(self, micro_batch: MicroBatch) -> None:
        """Forward and backward of one batch, forgotten."""
        self._accumulate([micro_batch], window=0)
        self._sums.zero()

    def flush(self) -> None:
        """Nothing is ever pending here."""

    def state_tensors(self) -> dict[str, dict[str, Tensor | Narrow]]:
        """Live tensors; the same on every worker."""
        return by_kind(self._states)

    def state_scalars(self) -> dict[str, Any]:
        """The loss scale."""
        return self._updater.scaler.state()

    def loaded(self, scalars: dict[str, Any]) -> None:
        """Rounds the masters into the working copies."""
        self._updater.scaler.load(scalars)
        round_masters(self._states)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Whole master weights, one at a time, on the CPU."""
        for state in self._states:
            yield state.name, state.master.detach().cpu()

    def peak_memory_bytes(self) -> int:
        """Peak of this worker."""
        return peak_memory_bytes(self._device.type)
