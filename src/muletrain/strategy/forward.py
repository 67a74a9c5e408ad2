"""One micro-batch through a whole model, for the strategies that run it whole (resident, zero*)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from muletrain.data.batch import MicroBatch
from muletrain.models.causal import CausalModel
from muletrain.strategy.randomness import PROLOGUE, KeyedRandom
from muletrain.strategy.update import Updater


def on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The batch where it is computed with. On a GPU rows of one segment each get bounds too: one compiled graph, not two."""
    if device.type == "cuda" and not batch.cu_seqlens.numel():
        rows, length = batch.input_ids.shape
        batch = replace(batch, cu_seqlens=torch.arange(0, (rows + 1) * length, length, dtype=torch.int32), max_seqlen=length)
    moved = batch.to(device)
    if moved.cu_seqlens.numel():  # its length varies with the documents: one compiled graph, not one a length
        torch._dynamo.maybe_mark_dynamic(moved.cu_seqlens, 0)
    return moved


def loss_sum(
    model: CausalModel, batch: MicroBatch, device: torch.device, random: KeyedRandom, window: int, factor: float
) -> Tensor:
    """Sum of the loss over the batch's labels, fp32 or fp64 scalar; its gradients come multiplied by `factor`."""
    moved = on_device(batch, device)
    random.at(window, batch.index)
    random.enter(PROLOGUE)
    loss: Tensor = model(
        moved.input_ids,
        moved.labels,
        moved.position_ids,
        moved.cu_seqlens,
        moved.max_seqlen,
        grad_scale=factor,
    )
    return loss


@torch.no_grad()
def evaluate(
    model: CausalModel, micro_batches: Sequence[MicroBatch], device: torch.device, updater: Updater
) -> tuple[float, int]:
    """(loss sum, tokens) over all workers, without dropout; draws no random number and changes no state."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    model.eval()
    silent = KeyedRandom(0, enabled=False)
    for batch in micro_batches:
        total += loss_sum(model, batch, device, silent, 0, 1.0)
    model.train()
    count = torch.tensor(float(sum(b.tokens for b in micro_batches)), dtype=torch.float64, device=device)
    sums = updater.total(torch.stack([total, count]))
    return float(sums[0]), int(sums[1])
