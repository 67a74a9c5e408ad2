"""zero1, zero2, zero3: optimizer state, gradients and parameters sharded over the workers, by PyTorch FSDP2.

Parameters live as fp32 (fp64) shards, which are the masters; FSDP gathers them in the compute dtype and sums gradients in
master precision. Frozen ones are shards of the compute dtype, gathered like the others, and nothing of theirs is summed. Losses
are sums over tokens, so FSDP's division by the number of workers is turned off.

  zero1  parameters are gathered once a step and kept, gradients are summed locally and scattered with the last micro-batch
  zero2  parameters are kept, gradients are scattered after every micro-batch: no whole gradient is held
  zero3  parameters are gathered a block at a time, in forward and again in backward
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from muletrain.data.batch import MicroBatch
from muletrain.metrics.communication import CommunicationMeter
from muletrain.metrics.memory import peak_memory_bytes
from muletrain.models.build import materialize_buffers
from muletrain.models.causal import CausalModel, canonical_name
from muletrain.models.weights import WeightSource
from muletrain.optim.adamw import ParameterState, decayed
from muletrain.precision.policy import Precision
from muletrain.spec.recipe import StrategyName
from muletrain.strategy.collectives import TimedAllGather, TimedReduceScatter
from muletrain.strategy.contract import Narrow, StepContext, StepResult
from muletrain.strategy.forward import evaluate, loss_sum
from muletrain.strategy.materials import Materials
from muletrain.strategy.parts import StepParts
from muletrain.strategy.update import square_norm


class ShardedStrategy:
    """See strategy.contract.Strategy. Needs a process group, also for one worker."""

    def __init__(self, materials: Materials, kind: StrategyName) -> None:
        m = materials
        model, device, precision = m.model, m.device, m.precision
        self._kind, self._model, self._device = kind, model, device
        self._random, self._updater, self._meter = m.random, m.updater, m.meter
        model.to(precision.master)
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(precision.compute)
        _shard(model, device, precision, kind, m.meter)
        model.to_empty(device=device)
        materialize_buffers(model, device)
        self._parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._parameters: list[tuple[str, nn.Parameter]] = []
        """Those that are trained."""
        for name, parameter in model.named_parameters():
            _load(canonical_name(name), parameter, m.weights)
            if parameter.requires_grad:
                self._parameters.append((canonical_name(name), parameter))
        self._exp_avg = {name: _zeros(parameter) for name, parameter in self._parameters}
        self._exp_avg_sq = {name: _zeros(parameter) for name, parameter in self._parameters}

    def step(self, micro_batches: Sequence[MicroBatch], context: StepContext) -> StepResult:
        """One update over this worker's micro-batches."""
        parts = StepParts(self._device, self._meter)
        total = self._accumulate(micro_batches, context.window)
        grads = [_local(parameter.grad) for _, parameter in self._parameters]
        parts.end("compute")
        decision = self._updater.decide(total, sum(b.tokens for b in micro_batches), square_norm(grads), context)
        self._updater.apply(self._states(), grads, decision)
        self._forget()
        parts.end("update")
        return self._updater.result(decision, parts.seconds)

    def _accumulate(self, micro_batches: Sequence[MicroBatch], window: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for number, batch in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            self._model.set_is_last_backward(last)  # type: ignore[operator]
            self._model.set_requires_gradient_sync(last or self._kind != "zero1")  # type: ignore[operator]
            self._model.set_reshard_after_backward(last or self._kind == "zero3")  # type: ignore[operator]
            loss = loss_sum(self._model, batch, self._device, self._random, window, self._updater.scaler.factor)
            loss.backward()
            total += loss.detach()
        return total

    def _forget(self) -> None:
        for _, parameter in self._parameters:
            parameter.grad = None

    def _states(self) -> list[ParameterState]:
        # Local tensors are looked up each time: FSDP may swap a shard's storage for a padded one at its first forward.
        return [
            ParameterState(
                name,
                _local(parameter),
                _local(self._exp_avg[name]),
                _local(self._exp_avg_sq[name]),
                None,
                decayed(parameter),
            )
            for name, parameter in self._parameters
        ]

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, int]:
        """(loss sum, tokens) over all workers."""
        result = evaluate(self._model, micro_batches, self._device, self._updater)
        for part in self._parts:
            part.reshard()
        return result

    def warm_up(self, micro_batch: MicroBatch) -> None:
        """Forward and backward of one batch, forgotten."""
        self._accumulate([micro_batch], window=0)
        self._forget()

    def flush(self) -> None:
        """Nothing is ever pending here."""

    def state_tensors(self) -> dict[str, dict[str, Tensor | Narrow]]:
        """Live DTensors."""
        return {
            "parameter": {name: parameter.detach() for name, parameter in self._parameters},
            "exp_avg": dict(self._exp_avg),
            "exp_avg_sq": dict(self._exp_avg_sq),
        }

    def state_scalars(self) -> dict[str, Any]:
        """The loss scale."""
        return self._updater.scaler.state()

    def loaded(self, scalars: dict[str, Any]) -> None:
        """The shards are the masters: nothing to refresh."""
        self._updater.scaler.load(scalars)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights, gathered one at a time."""
        for name, parameter in self._parameters:
            whole = parameter.detach().full_tensor()  # type: ignore[attr-defined]
            yield name, whole.cpu()

    def peak_memory_bytes(self) -> int:
        """Peak of this worker."""
        return peak_memory_bytes(self._device.type)


def _shard(
    model: CausalModel, device: torch.device, precision: Precision, kind: StrategyName, meter: CommunicationMeter
) -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute if precision.split else None,
        reduce_dtype=precision.master if precision.split else None,
    )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": kind == "zero3"}
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # else the factor becomes a scaled sum, which gloo lacks
            if device.type == "cpu":
                module.set_custom_all_gather(TimedAllGather(meter))
                module.set_custom_reduce_scatter(TimedReduceScatter(meter))


@torch.no_grad()
def _load(name: str, parameter: nn.Parameter, weights: WeightSource) -> None:
    assert isinstance(parameter, DTensor)
    whole = weights.tensor(name).to(parameter.device, parameter.dtype)
    mine = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.to_local().copy_(mine.to_local())


def _zeros(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter, requires_grad=False)


def _local(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    local: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return local
