"""RunConfig: what the user asks for. Only here may a field say "auto" or be absent; the planner turns it into a Plan.

Every leaf changes the Plan or the run (held by a test), so a key that nothing reads yet is not here: the config room names
the keys that the design keeps for later and says so when it meets one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from muletrain.spec.units import Bytes, Count, Flag, Length, Positive, Real, parse_count, parse_flag, parse_float
from muletrain.spec.value import Value


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _auto_or_count(value: Any) -> Any:
    if str(value).strip().lower() == "auto":
        return "auto"
    try:
        count = parse_count(value)
    except ValueError:
        raise ValueError(f"{value!r} is neither auto nor a count; write it like auto or 4") from None
    if count == 0:
        raise ValueError("0 is too few; write at least 1, or auto")
    return count


def _auto_or_flag(value: Any) -> Any:
    if str(value).strip().lower() == "auto":
        return "auto"
    try:
        return parse_flag(value)
    except ValueError:
        raise ValueError(f"{value!r} is neither auto, on nor off; write auto, true or false") from None


def _auto_or_real(value: Any) -> Any:
    if str(value).strip().lower() == "auto":
        return "auto"
    try:
        number = parse_float(value)
    except ValueError:
        raise ValueError(f"{value!r} is neither auto nor a number; write it like auto or 32") from None
    if number <= 0:
        raise ValueError(f"{value!r} is too small; it must be more than 0, or auto")
    return number


Name = Annotated[str, Field(min_length=1)]
Sources = Annotated[tuple[Name, ...], BeforeValidator(_as_tuple), Field(min_length=1)]
AutoCount = Annotated[int | Literal["auto"], BeforeValidator(_auto_or_count)]
AutoReal = Annotated[float | Literal["auto"], BeforeValidator(_auto_or_real)]
AutoFlag = Annotated[bool | Literal["auto"], BeforeValidator(_auto_or_flag)]
StrategyName = Literal["resident", "zero1", "zero2", "zero3", "streamed"]
ComputeDtype = Literal["fp32", "bf16", "fp16", "fp64"]
OptimizerState = Literal["fp32", "bf16", "8bit"]


class AdapterSection(Value):
    """Small trained matrices beside frozen weights, instead of training the whole model."""

    kind: Literal["none", "lora"] = "none"
    """none: every weight is trained. lora: each target W stays as it is and becomes W + scale x B A, of which A and B are
    trained (Hu et al. 2021)."""
    rank: Count = Field(16, ge=1)
    """Rows of A and columns of B."""
    alpha: AutoReal = "auto"
    """The scale is alpha / rank. auto: twice the rank, so the scale is 2."""
    dropout: Real = Field(0.0, ge=0.0, lt=1.0)
    """Share of A's inputs that are zeroed in training."""
    targets: Sources = ("auto",)
    """Names of the linear layers of a block to adapt, e.g. [q_proj, v_proj]. auto: all of them (of models with
    experts: attention's)."""
    rslora: Flag = False
    """Scale by alpha / sqrt(rank) instead, which keeps high ranks learning (Kalajdzievski 2023)."""


class ModelSection(Value):
    """What is trained."""

    source: Name
    """A catalogue name (deepseek-llm-7b), a Hugging Face folder, or a hub name."""
    weights: Literal["auto", "pretrained", "random"] = "auto"
    """auto: pretrained where the source has weights, random for a catalogue shape."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields of the Hugging Face config to change, e.g. {num_hidden_layers: 4}. An unknown field is an error."""
    adapter: AdapterSection = AdapterSection()


class DataSection(Value):
    """What it is trained on."""

    source: Sources
    """Text files, folders, globs, JSONL files, or a folder that `mule data prepare` wrote. One or a list."""
    tokenizer: Name = "auto"
    """A folder, a tokenizer.json or a hub name. auto: the model's own."""
    text_key: Name = "text"
    """The field of a JSON row that holds the text."""
    sequence_length: Length = Field(2048, ge=2)
    """Tokens in a packed row; 4k is 4,096."""
    packing: Literal["best_fit", "concat", "none"] = "best_fit"
    """best_fit: whole documents share a row; concat: rows are cut from one stream; none: a document a row, padded."""
    validation_fraction: Real = Field(0.01, ge=0.0, le=0.5)
    """Share of documents held out, chosen by a hash of their content, so it never depends on order or worker count."""
    bad_rows: Literal["skip", "stop"] = "skip"
    """What to do with a row that cannot be read: skip and count it, or stop. Either way all are listed by file:line."""
    cache_dir: Name = "auto"
    """Where tokenized data is kept. auto: $MULETRAIN_CACHE or ~/.cache/muletrain."""
    processes: AutoCount = "auto"
    """Tokenizing processes. auto: one a core."""


class OptimizerSection(Value):
    """AdamW with decoupled weight decay; norms, biases and embeddings of one dimension are never decayed."""

    learning_rate: Real = Field(3e-4, ge=0.0)
    """The peak rate; train.schedule shapes it over the run."""
    beta1: Real = Field(0.9, ge=0.0, lt=1.0)
    """Decay of the mean of gradients."""
    beta2: Real = Field(0.95, ge=0.0, lt=1.0)
    """Decay of the mean of squared gradients."""
    epsilon: Real = Field(1e-8, gt=0.0)
    """Added to the root of the second moment."""
    weight_decay: Real = Field(0.1, ge=0.0)
    """Share of a weight taken off at each update, times the learning rate; matrices only."""
    state: OptimizerState = "fp32"
    """Format of both moments between updates; narrower ones are rounded stochastically. bf16 and 8bit: streamed only."""


class ScheduleSection(Value):
    """The learning rate as a function of applied updates (never of workers or micro-batches)."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """constant; linear or cosine decay to the end; wsd: warm up, stay, decay at the end."""
    warmup_steps: Count = 0
    """Updates over which the rate rises linearly from zero."""
    final_ratio: Real = Field(0.1, ge=0.0, le=1.0)
    """The last learning rate over the peak one."""
    decay_fraction: Real = Field(0.2, gt=0.0, le=1.0)
    """wsd only: the share of steps over which the rate decays at the end."""


class TrainSection(Value):
    """How long and how."""

    steps: Positive | None = None
    """Optimizer updates. With `epochs` also given, whichever ends first."""
    epochs: Positive | None = None
    """Passes over the data."""
    tokens_per_step: Positive = 65_536
    """Positions in one update over all workers: sequences x sequence_length. The same for any number of workers.
    Rounded to whole micro-batches where that moves it by less than 5 %; refused otherwise, naming what would work."""
    micro_batch: Count = Field(1, ge=1)
    """Sequences in one forward pass. Micro-batches are fixed here and dealt whole to the workers."""
    clip_norm: Real = Field(1.0, ge=0.0)
    """Global gradient norm limit; 0 turns clipping off."""
    seed: Count = 0
    """Of the initial weights, the order of the data, dropout and rounding."""
    evaluate_every: Count = 0
    """Steps between evaluations on the held-out documents; 0: only at the end."""
    evaluate_sequences: Count = Field(64, ge=1)
    """Held-out sequences used by one evaluation (all, if there are fewer)."""
    compile: AutoFlag = "auto"
    """torch.compile of each block. auto: on GPUs only."""
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()


class PrecisionSection(Value):
    """Number formats. The master copy of the weights is fp32 (fp64 with compute: fp64); moments: train.optimizer.state."""

    compute: ComputeDtype = "bf16"
    """fp64 is for checking results on a CPU."""
    initial_loss_scale: Real = Field(65536.0, gt=0.0)
    """fp16 only: where the dynamic loss scale starts, in units of the mean loss."""
    gradients: Literal["auto", "fp32", "bf16"] = "auto"
    """streamed only: how a block's gradient, always summed in fp32, waits on the host for its update.
    auto: bf16 with compute: bf16, else as the master weights."""


class MemorySection(Value):
    """Where memory lives and how much may be used."""

    strategy: Literal["auto"] | StrategyName = "auto"
    """resident: all on the card. zero1, zero2, zero3: optimizer, + gradients, + parameters sharded over the workers.
    streamed: in host memory, a few blocks at a time on each card. auto: the least communication that fits."""
    activations: Literal["auto", "keep", "offload", "recompute"] = "auto"
    """What a block keeps for backward. auto: keep if it fits; under streamed on a GPU, as many blocks offload as make the step
    faster. offload: send it to the host and back; streamed only."""
    gpu_limit: Bytes | None = None
    """Bytes of card memory this run may use. Absent: what the card has."""
    host_limit: Bytes | None = None
    """Bytes of host memory this run may use. Absent: what the machine has."""
    loss_chunk: Count = Field(1024, ge=1)
    """Tokens whose logits are held at once (fewer: less memory)."""
    waves: AutoCount = "auto"
    """streamed only: groups in which a step's micro-batches go through the model; more take less memory and more transfers.
    auto: 1."""
    placement: Literal["auto"] | Count = "auto"
    """streamed only, on a GPU: blocks that stay on the card with all of their state, beside the embedding and the head.
    auto: as many as there is room for."""


class ParallelSection(Value):
    """How many workers, and on what."""

    workers: AutoCount = "auto"
    """auto: one a GPU, or one on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs if there are any."""
    hang_after_s: Count = 600
    """Seconds in a step without a sign of life after which a worker counts as hung and all are ended; 0: never.
    At least ten times the longest step so far; compiling, evaluating and saving may take as long as they take."""


class CheckpointSection(Value):
    """What is saved, when, and what a start does with it."""

    every: Count = 0
    """Steps between checkpoints; 0: only at the end (and on a signal)."""
    keep: Count = Field(2, ge=1)
    """Complete checkpoints to keep; older ones go only after a newer one is verified."""
    resume: Literal["auto", "never", "require"] = "auto"
    """auto: continue from the newest complete checkpoint in run_dir if there is one. never: refuse a used run_dir."""
    model_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Number format of the saved Hugging Face weights. auto: precision.compute (fp32 for fp64)."""


class LogSection(Value):
    """What is shown and written. events.jsonl is always written."""

    every: Count = Field(1, ge=1)
    """Steps between step events."""
    console: Literal["auto", "bar", "plain", "quiet"] = "auto"
    """auto: a progress bar on a terminal, plain lines elsewhere."""


class RunConfig(Value):
    """A whole request. `run_dir` is the run's folder: request, plan, events, record, checkpoints."""

    run_dir: Name
    """The run's folder, e.g. runs/first: made if it is not there, continued if it is."""
    model: ModelSection
    data: DataSection
    train: TrainSection = TrainSection()
    precision: PrecisionSection = PrecisionSection()
    memory: MemorySection = MemorySection()
    parallel: ParallelSection = ParallelSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
