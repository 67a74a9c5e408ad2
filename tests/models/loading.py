"""Puts a planned model's weights into it on the CPU, and packs documents as the data room does."""

from __future__ import annotations

import torch
from torch import Tensor

from muletrain.models.build import build_on_meta, materialize_buffers
from muletrain.models.causal import CausalModel, canonical_name
from muletrain.models.weights import open_weights
from muletrain.spec.plan import ModelPlan


@torch.no_grad()
def load(plan: ModelPlan, *, dtype: torch.dtype = torch.float32, loss_chunk: int = 64, seed: int = 0) -> CausalModel:
    model = build_on_meta(plan, dtype=dtype, loss_chunk=loss_chunk)
    source = open_weights(plan, model, seed)
    model.to_empty(device="cpu")
    materialize_buffers(model, "cpu")
    for name, parameter in model.named_parameters():
        parameter.copy_(source.tensor(canonical_name(name)))
    return model


def packed(*rows: list[Tensor], length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(ids, labels, positions [B, length], bounds) of rows of documents: zeros pad a row and are a segment of their own."""
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    labels = torch.full((len(rows), length), -100)
    positions = torch.zeros(len(rows), length, dtype=torch.long)
    lengths = [0]
    for row, documents in enumerate(rows):
        start = 0
        for document in (*documents, torch.zeros(length - sum(map(len, documents)), dtype=torch.long)):
            end = start + len(document)
            ids[row, start:end] = document
            positions[row, start:end] = torch.arange(len(document))
            lengths.append(len(document))
            start = end
        start = 0
        for document in documents:
            labels[row, start : start + len(document) - 1] = document[1:]
            start += len(document)
    return ids, labels, positions, torch.tensor([*lengths, 0, 0]).cumsum(0).to(torch.int32)  # with a repeated tail
