"""MicroBatch: what the data room hands to a strategy.

A row holds segments (a document, or a piece of one) one after another, then padding. Everything a model needs to keep segments
apart travels with the batch: positions restart at each segment and `cu_seqlens` bounds attention. Labels are aligned with the
inputs (labels[b, t] is the token after input t in the same segment), so nothing shifts them again downstream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

IGNORE = -100


@dataclass(frozen=True)
class MicroBatch:
    """B rows of S positions. `index` is the micro-batch's number within its step over all workers; -1 marks filler.

    Shapes: input_ids, labels, position_ids [B, S] int64; cu_seqlens [K + 1] int32 over the flattened B x S positions, padding
    being segments of its own, its tail repeated to a bucketed length so that compiled code sees few shapes; an empty tensor
    means that every row is one segment (plain causal attention is right). max_seqlen: an upper bound of segment lengths.
    """

    index: int
    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    tokens: int
    """Positions with a label."""
    padding_tokens: int
    """Positions in no segment."""
    sample_ids: tuple[int, ...] = ()
    """Row numbers in the data set, for messages and for proofs of order."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same batch on a device (asynchronously where the source is pinned)."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("input_ids", "labels", "position_ids", "cu_seqlens")
        }
        return replace(self, **moved)

    def filler(self) -> MicroBatch:
        """A batch of the same shape that trains nothing: keeps collectives in step where workers hold unequal counts."""
        return replace(self, index=-1, labels=torch.full_like(self.labels, IGNORE), tokens=0, sample_ids=())
