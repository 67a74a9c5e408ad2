"""A made-up card and model whose figures can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from muletrain.catalog.gpus import GpuSpec, find_gpu
from muletrain.planner.job import Formats, Job
from muletrain.spec.model_shape import ModelShape

CARD = replace(
    find_gpu("A100 SXM4 80GB"), memory_bytes=100_000, bandwidth_bytes_s=1e9, flops={"bf16": 1e12, "fp8": 2e12}, tdp_w=1e6,
    pcie_generation=4, pcie_lanes=16,
)  # fmt: skip
# 1,000 parameters in each of 4 blocks, 3,000 outside: 1,490 in the embedding, as many in the head, a norm of 20.
SHAPE = ModelShape(
    name="x", family="llama", hidden=20, layers=4, heads=2, kv_heads=1, head_dim=10, ffn=50, vocab=100, tied=False,
    max_positions=64, parameters=7000, block_parameters=1000, matmul_parameters=5000,
)  # fmt: skip
STATES = Formats(working=2, gradient=3, master=5, moments=7, frozen=1, outside=4)


def job(**changes: Any) -> Job:
    """One card, 8 tokens a micro-batch, two of them, everything trained and kept."""
    plain = Job(shape=SHAPE, card=CARD, sequence=4, micro_batch=2, micro_batches=2, formats=STATES)
    return replace(plain, **changes)


def card(**changes: Any) -> GpuSpec:
    return replace(CARD, **changes)
