"""What memory depends on beside the model, and what one block keeps for backward.

Activations a token a block, in numbers of c bytes; hidden h, attention width w, key/value width k, feed-forward f. Compiled:
4h + 2w + 2k + 3f (2f without a gate): the block's and the norms' inputs and outputs, queries, keys, values, attention's output,
gate, up and their product. That is 32.1 h bytes for a 7 B LLaMA in bf16, as measured. Eager: the norms' inputs, normalized and
scaled, 6h (8h where c is 2: they compute in fp32), 2w + 2k, gate, up, activation and product 4f; Qwen3's norms of queries and
keys 2(w + k) more (3 where c is 2); GPT-2's norms keep no third copy, its activation takes five steps: 4h + 2w + 2k + 5f. Held
to within 5 % of what autograd saves (tests/planner/test_measured_memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from muletrain.schedule.formats import state_bytes_of
from muletrain.spec.model_shape import ModelShape
from muletrain.spec.plan import AdapterPlan, StreamingPlan
from muletrain.spec.recipe import ComputeDtype, StrategyName

GIB = 2**30
CONTEXT_BYTES = GIB // 2
"""CUDA context and libraries on a card; interpreter and libraries of a worker on a CPU. Measured: 0.3 to 0.65 GiB."""
CARD_CONTEXT_BYTES = 3 * GIB // 4
"""The same with what cuBLAS takes, where a ledger is held to what the driver reports. Measured on an H200: 0.78 GiB."""
COMMUNICATION_BYTES = GIB // 2
"""NCCL's buffers on a card. Measured: 0.2 to 1 GiB."""
HOST_PROCESS_BYTES = 2 * GIB
"""Host memory of a worker whose model is on a card: libraries, CUDA's host side, pinned staging. An allowance."""
_BYTES = {"fp32": (4, 4), "bf16": (4, 2), "fp16": (4, 2), "fp64": (8, 8)}


@dataclass(frozen=True)
class Footprint:
    """What memory depends on, beside the model."""

    strategy: StrategyName
    activations: Literal["keep", "recompute"]
    compute: ComputeDtype
    compiled: bool
    device: Literal["cpu", "cuda"]
    workers: int
    micro_batch: int
    """Sequences."""
    micro_batches: int
    """In a step, over all workers."""
    sequence_length: int
    loss_chunk: int
    streaming: StreamingPlan = field(default_factory=StreamingPlan)
    """streamed only."""
    adapter: AdapterPlan = field(default_factory=AdapterPlan)

    @property
    def tokens(self) -> int:
        """Positions in one micro-batch."""
        return self.micro_batch * self.sequence_length

    @property
    def rounds(self) -> int:
        """Micro-batches that the busiest worker runs in a step."""
        return -(-self.micro_batches // self.workers)

    @property
    def bytes_of(self) -> tuple[int, int]:
        """(master, compute) bytes of one number."""
        return _BYTES[self.compute]


def block_activations(shape: ModelShape, run: Footprint) -> float:
    """Bytes that one block keeps for the backward of one micro-batch."""
    numbers = _compiled_numbers(shape) if run.compiled else _eager_numbers(shape, run.bytes_of[1])
    return float(run.bytes_of[1] * numbers * run.tokens) + _adapter_activations(shape, run)


def _compiled_numbers(shape: ModelShape) -> int:
    return 4 * shape.hidden + 2 * (shape.heads + shape.kv_heads) * shape.head_dim + (3 if shape.gated else 2) * shape.ffn


def _eager_numbers(shape: ModelShape, number_bytes: int) -> int:
    attention, half = (shape.heads + shape.kv_heads) * shape.head_dim, number_bytes < 4
    if not shape.gated:  # layer norms, whose kernel keeps their input alone
        return 4 * shape.hidden + 2 * attention + 5 * shape.ffn
    normed = (3 if half else 2) * attention if shape.family.startswith("qwen3") else 0
    return (8 if half else 6) * shape.hidden + 2 * attention + normed + 4 * shape.ffn


def adapter_state(run: Footprint) -> tuple[float, str]:
    """(bytes, how) of an adapter and all its training state in one place; streamed keeps its moments as the recipe says."""
    master, compute = run.bytes_of
    moments, copy = 2.0 * master, compute if compute < master else 0
    if run.strategy == "streamed":
        state = state_bytes_of(run.compute, run.streaming.moments, "master")
        moments, copy = state.moments, compute if state.own_working else 0
    each = 2 * master + moments + copy
    return each * run.adapter.parameters, f"{each:g} bytes x {run.adapter.parameters}: weights, masters, gradients, moments"


def exchanged_adapters(run: Footprint) -> tuple[float, str]:
    """(bytes, how) of the host memory that streamed workers sum an adapter's gradients in."""
    master = run.bytes_of[0]
    return master * run.adapter.parameters * run.workers, f"{master} bytes x {run.adapter.parameters} x {run.workers} workers"


def _adapter_activations(shape: ModelShape, run: Footprint) -> float:
    """What the adapters of one block keep beside that: A's output, and with dropout A's input and a byte a number for what
    was kept of it, as each layer draws its own."""
    c, adapter = run.bytes_of[1], run.adapter
    a_token = 0.0
    for linear in shape.adapted(adapter.targets):
        a_token += c * adapter.rank + ((c + 1) * linear.inputs if adapter.dropout else 0)
    return a_token * run.tokens
