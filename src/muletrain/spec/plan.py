"""Plan: what will happen. Everything is decided: no optional field, no "auto". Workers read this and nothing else."""

from __future__ import annotations

from typing import Any, Literal

from muletrain.spec.ledger import Ledger
from muletrain.spec.model_shape import ModelShape
from muletrain.spec.recipe import ComputeDtype, OptimizerSection, OptimizerState, ScheduleSection, StrategyName
from muletrain.spec.value import Value

SCHEMA_VERSION = 1
Activations = Literal["recompute", "keep", "offload"]
"""What a block does with what backward needs: computes it again, keeps it on the card, sends it to the host and back."""


class AdapterPlan(Value):
    """What is trained beside a frozen model; kind none: the model itself is."""

    kind: Literal["none", "lora"] = "none"
    rank: int = 0
    alpha: float = 0.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    """Endings of the names of a block's linear layers, as peft's target_modules."""
    rslora: bool = False
    parameters: int = 0
    """Trained parameters."""
    base: str = ""
    """What a saved adapter names as its base: a hub name, or a folder's full path."""

    @property
    def trains(self) -> bool:
        """Only the adapter is trained."""
        return self.kind != "none"


class ModelPlan(Value):
    """The model to build."""

    source: str
    """A resolved Hugging Face folder, a hub name, or a catalogue name."""
    config: dict[str, Any]
    """The Hugging Face config fields (model_type included), overrides applied. Empty: read it from `source` (hub names)."""
    weights: Literal["pretrained", "random"]
    shape: ModelShape
    adapter: AdapterPlan = AdapterPlan()


class DataPlan(Value):
    """The data to read and how rows are made of it."""

    source: tuple[str, ...]
    tokenizer: str
    text_key: str
    sequence_length: int
    packing: Literal["best_fit", "concat", "none"]
    validation_fraction: float
    bad_rows: Literal["skip", "stop"]
    cache_dir: str
    processes: int


class TrainPlan(Value):
    """The work."""

    steps: int
    """Updates to make; 0: as many as `epochs` gives."""
    epochs: int
    """Passes over the data after which to end; 0: no limit by epochs."""
    micro_batch: int
    """Sequences in a micro-batch."""
    micro_batches: int
    """Micro-batches in a full step, over all workers."""
    clip_norm: float
    """0: no clipping."""
    seed: int
    evaluate_every: int
    evaluate_sequences: int
    compile: bool
    optimizer: OptimizerSection
    schedule: ScheduleSection


class PrecisionPlan(Value):
    """Number formats."""

    compute: ComputeDtype
    initial_loss_scale: float
    """fp16 only; 1 elsewhere."""


class StreamingPlan(Value):
    """How the streamed strategy lays out a step; without meaning under the others."""

    slots: int = 2
    """Blocks of a kind whose weights are on the device at once."""
    staging: int = 3
    """Buffers that pieces of optimizer state pass through."""
    piece: int = 2**25
    """Elements in a piece of optimizer state, at most."""
    waves: int = 1
    """Groups that a step's micro-batches go through the model in."""
    inputs: Literal["card", "host"] = "card"
    """Where the blocks' inputs wait for backward."""
    activations: tuple[Activations, ...] = ()
    """By block, what it saves for backward: nothing (it is computed again), all on the card, or all on the host. Empty:
    nothing."""
    offload_every: int = 1
    """Blocks that offload send each so-many-th micro-batch of a step; of the others they keep nothing."""
    update: Literal["next_fetch", "in_backward"] = "next_fetch"
    """next_fetch: a block is updated when it is next fetched, when the global norm is known. in_backward: at once, without
    clipping or loss scale."""
    on_card: tuple[int, ...] = ()
    """Units all of whose state stays on the device: 0 is the embedding, then the blocks, then the head."""
    moments: OptimizerState = "fp32"
    """Of the optimizer, between updates."""
    slices: tuple[int, ...] = ()
    """Several workers: what share of every unit each updates, by worker, as whole numbers; empty: the same."""
    ring: int = 3
    """Several workers: blocks whose gradients wait on the host to be summed, a worker."""
    gradients: Literal["master", "bf16"] = "master"
    """Format of a block's summed gradient in host memory: the masters' (fp32), or bf16."""


class MemoryPlan(Value):
    """Where memory lives."""

    strategy: StrategyName
    activations: Literal["keep", "recompute"]
    loss_chunk: int
    gpu_limit: int
    """Bytes a worker may use on its card; 0: no cap."""
    host_limit: int = 0
    """Bytes of host memory that the plan was held to; 0: what the machine has."""
    streaming: StreamingPlan = StreamingPlan()
    ledger: Ledger


class ParallelPlan(Value):
    """The workers."""

    workers: int
    device: Literal["cpu", "cuda"]
    hang_after_s: int = 600
    """Seconds in a step without a sign of life after which a worker counts as hung; 0: never."""
    peak_flops: float = 0.0
    """Dense peak of the slowest device in the compute dtype, FLOP/s; 0: not in the catalogue, no utilisation is reported."""


class CheckpointPlan(Value):
    """What is saved."""

    every: int
    keep: int
    resume: Literal["auto", "never", "require"]
    model_dtype: Literal["fp32", "bf16", "fp16"]


class LogPlan(Value):
    """What is shown."""

    every: int
    console: Literal["bar", "plain", "quiet"]


class ExpectedPlan(Value):
    """What the plan says that the run will do; the record lays it beside what it did."""

    tokens_per_s: float = 0.0
    """Positions, over all workers; 0: not predicted (rates are not known, or not for this strategy)."""
    source: str = ""
    """Of the rates."""


class Plan(Value):
    """The decided run."""

    schema_version: int = SCHEMA_VERSION
    run_dir: str
    model: ModelPlan
    data: DataPlan
    train: TrainPlan
    precision: PrecisionPlan
    memory: MemoryPlan
    parallel: ParallelPlan
    checkpoint: CheckpointPlan
    log: LogPlan
    expected: ExpectedPlan = ExpectedPlan()
    reasons: tuple[str, ...]
    """One line for each decision the recipe left open, with its why."""

    @property
    def tokens_per_step(self) -> int:
        """Positions in a full step, over all workers."""
        return self.train.micro_batches * self.train.micro_batch * self.data.sequence_length
