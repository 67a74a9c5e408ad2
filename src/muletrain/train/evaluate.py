"""Evaluation on held-out documents: the mean over all their tokens, whatever the batches and workers."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from muletrain.data.batch import MicroBatch
from muletrain.spec.events import EvaluationEvent
from muletrain.strategy.contract import Strategy


def evaluate(strategy: Strategy, batches: Sequence[MicroBatch], text_bytes: int, step: int) -> EvaluationEvent:
    """Loss over this worker's share of the held-out batches, summed over workers. Collective.

    `text_bytes` are the UTF-8 bytes of the same text over all workers, so that models with other tokenizers can be compared.
    """
    start = time.perf_counter()
    loss_sum, tokens = strategy.evaluate(batches)
    return EvaluationEvent(
        step=step,
        loss=loss_sum / tokens,
        tokens=tokens,
        bits_per_byte=loss_sum / math.log(2) / text_bytes,
        seconds=time.perf_counter() - start,
    )
