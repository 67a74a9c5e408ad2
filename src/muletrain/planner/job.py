"""Job: one step of any trainer on any cards, as far as memory and time depend on it.

Wider than what muletrain runs (footprint.py describes that to the byte): trainers differ in number formats, in kernels and in
what they shard or send to the host, and a plan that compares with them, prices a cluster, or is scored against published
measurements has to say so. Formulas are in job_memory.py and job_time.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from muletrain.catalog.gpus import GpuSpec
from muletrain.spec.model_shape import ModelShape

Kernels = Literal["written", "compiled", "fused", "eager"]
"""written: a program for this model, nothing saved twice. compiled: torch.compile or as good. fused: kernels as good as that,
each started from Python (Unsloth, Liger). eager: operation by operation."""
Shard = Literal["none", "zero1", "zero2", "zero3"]
Policy = Literal["keep", "selective", "recompute"]
"""selective: outputs of matrix products and attention are kept, all else is computed again."""
Matmul = Literal["bf16", "fp16", "fp16_fp16", "fp8"]
"""fp16_fp16: fp16 with fp16 accumulation."""
Offloaded = Literal["weights", "gradients", "master", "moments", "paged", "activations", "update"]
"""update: the optimizer runs on the host's processor. paged: moments in memory that the driver moves by the page and that no
trainer counts."""


@dataclass(frozen=True)
class Formats:
    """Bytes a parameter while training. What a trainer does not have is 0."""

    working: float = 2.0
    gradient: float = 2.0
    master: float = 4.0
    moments: float = 8.0
    """Both."""
    frozen: float = 2.0
    """Of matrices in blocks that are not trained: 2, or 0.52 to 0.57 in NF4, with its scales."""
    outside: float = 2.0
    """Of embedding and head where they are not trained."""
    autocast: float = 0.0
    """Cached 16-bit copies beside fp32 weights."""

    @property
    def trained(self) -> float:
        """All of a trained parameter."""
        return self.working + self.gradient + self.master + self.moments + self.autocast


MIXED = Formats()
"""16 bytes: 16-bit weights and gradients, fp32 masters and moments (DeepSpeed, anchors of the ZeRO paper)."""
FP32_PARAMETERS = Formats(working=4, gradient=4, master=0, moments=8)
"""16 bytes: fp32 weights and gradients under autocast or FSDP's mixed precision."""
MEGATRON = Formats(working=2, gradient=4, master=4, moments=8)
"""18 bytes: gradients summed in fp32."""
PURE = Formats(working=2, gradient=2, master=0, moments=4)
"""8 bytes: everything in bf16."""
EIGHT_BIT = Formats(working=2, gradient=2, master=0, moments=2)
"""6 bytes: bf16 with 8-bit moments."""


@dataclass(frozen=True)
class Network:
    """What cards talk over. Bytes a second and card, one way."""

    inside: float
    """Collectives between the cards of a box, as measured in practice (bus rate)."""
    outside: float = 0.0
    """Between boxes; 0: one box."""
    start_s: float = 2e-5
    """What a collective takes beside its bytes, inside a box."""
    start_outside_s: float = 5e-5


@dataclass(frozen=True)
class Job:
    """Everything decided. All counts are of one step."""

    shape: ModelShape
    card: GpuSpec
    sequence: int
    micro_batch: int
    """Sequences on one card at a time."""
    micro_batches: int = 1
    """One after another on each card before an update."""
    cards: int = 1
    cards_a_box: int = 8
    network: Network | None = None
    """None with one card."""
    formats: Formats = MIXED
    trained: int = 0
    """Parameters trained; 0: all."""
    rank: int = 0
    """Of adapters; 0: none."""
    dequantized: bool = False
    """Frozen matrices are turned into 16 bits before each product."""
    matmul: Matmul = "bf16"
    kernels: Kernels = "compiled"
    policy: Policy = "keep"
    kept_share: float = 1.0
    """With `keep`: of a block's activations, where a trainer computes some again."""
    flash: bool = True
    loss_chunks: int = 1
    """Parts in which logits are made; 1: all of a micro-batch at once."""
    logit_bytes: float = 0.0
    """That a logit takes at the peak; 0: as planner.assumptions has it."""
    fused_loss: bool = False
    """Logits never leave the 16-bit format and turn into their gradient in place."""
    shard: Shard = "none"
    shard_over: int = 0
    """Cards that share state; 0: all data-parallel ones."""
    sharded_gradients: bool = False
    """Beside zero1: gradients are shared out as well."""
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    offload: frozenset[Offloaded] = frozenset()
    update_workspace: float = 0.0
    """Bytes a trained parameter for a moment during the update: 2 or 4 for torch's AdamW over lists of tensors, whose roots of
    the second moments are all alive at once; 4 for DeepSpeed's fp32 gradient."""
    deepspeed: bool = False
    """zero3 keeps up to a billion parameters gathered; zero2 fills two buckets of half a billion gradients."""
    loaded_whole: bool = False
    """Each card holds the whole model before it is sharded."""
    whole_gradients: bool = False
    """Gradients of micro-batches before the last add up whole on each card, and are shared out after it (no_sync)."""
    update_in_backward: bool = False
    """A gradient is used up as soon as it is there."""
    product_flops_s: float = 0.0
    """Measured rate of large 16-bit products; 0: from the catalogue."""
    power_w: float = 0.0
    """The card's limit; 0: its TDP."""
    adapter_fraction: float = 1.0
    """Of a block's matrices (by parameters) that carry adapters."""
    varied_lengths: bool = False
    """Rows are not packed or padded to one length: the allocator sees many sizes."""

    @property
    def full(self) -> bool:
        """All parameters are trained."""
        return not self.trained

    @property
    def trained_parameters(self) -> int:
        """Parameters with gradients and optimizer state."""
        return self.trained or self.shape.parameters

    @property
    def frozen_parameters(self) -> int:
        """Parameters without. Adapters are beside the model, so that all of it is frozen."""
        return self.shape.parameters if self.trained else 0

    @property
    def data_parallel(self) -> int:
        """Copies of the model's step."""
        return max(1, self.cards // (self.tensor * self.pipeline * self.context))

    @property
    def shards(self) -> int:
        """Cards that share a sharded state."""
        return self.shard_over or self.data_parallel * self.context

    @property
    def split(self) -> int:
        """Cards that one copy of the model's weights is cut over without being gathered."""
        return self.tensor * self.pipeline

    @property
    def tokens(self) -> int:
        """Positions on one card at a time."""
        return max(1, self.micro_batch * self.sequence // self.context)

    @property
    def tokens_per_step(self) -> int:
        """Positions in a step, over all cards."""
        return self.micro_batch * self.sequence * self.micro_batches * self.data_parallel

    @property
    def compute_bytes(self) -> int:
        """Of an activation."""
        return 2
