"""The request on this machine, decided: RunConfig x Machine -> Plan, by rules and without torch.

Every decision that the recipe left open appends a line to Plan.reasons. What a person must not get by surprise is refused here:
asking for a GPU that is not there, more positions than the model was made for, a number format the device cannot compute in.
All such problems that can be found together are reported together.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from muletrain.catalog import hub
from muletrain.catalog.gpus import gpu_peak
from muletrain.catalog.models import model_names, model_tokenizer
from muletrain.config.environment import cache_dir
from muletrain.config.rules import streamed_only, whole_micro_batches
from muletrain.planner.adapter import plan_adapter
from muletrain.planner.footprint import Footprint
from muletrain.planner.placement import budget, choose_device, choose_workers, place
from muletrain.planner.source import read_model
from muletrain.planner.speed import Speed, speed_of
from muletrain.spec.errors import InputError
from muletrain.spec.machine import Machine
from muletrain.spec.plan import (
    CheckpointPlan,
    DataPlan,
    LogPlan,
    MemoryPlan,
    ModelPlan,
    ParallelPlan,
    Plan,
    PrecisionPlan,
    StreamingPlan,
    TrainPlan,
)
from muletrain.spec.recipe import ComputeDtype, DataSection, ModelSection, RunConfig

Device = Literal["cpu", "cuda"]


def resolve(request: RunConfig, machine: Machine, *, interactive: bool = False, model: ModelPlan | None = None) -> Plan:
    """Decides everything that `request` left open for `machine`.

    `interactive`: the console is a terminal. `model`: already read (else model.source is). Raises InputError with all problems
    found, DoesNotFitError with the shortfall.
    """
    reasons: list[str] = []
    model = _model(request.model, model, reasons)
    device, why = choose_device(request.parallel, machine)
    _note(reasons, why)
    workers, why = choose_workers(request.parallel, device, machine)
    _note(reasons, why)
    problems = [*_length_problems(request, model), *_format_problems(request, device, workers, machine)]
    micro_batches = whole_micro_batches(request)
    if micro_batches is None:
        problems.append("train.tokens_per_step: not near a whole number of micro-batches")
    if problems or micro_batches is None:
        raise InputError(*problems)
    _note_batches(reasons, request, micro_batches, workers)
    if request.memory.gpu_limit and device == "cpu":
        reasons.append("memory.gpu_limit has no effect: the run is on the CPU (memory.host_limit would)")
    compiled = _compiled(request, device, reasons)
    run = replace(_footprint(request, device, workers, micro_batches, compiled), adapter=model.adapter)
    limits = budget(machine, device, workers, request.memory)
    placement = place(model.shape, request.memory, run, limits, _speed(machine, device, request.precision.compute))
    if placement.strategy != "streamed" and streamed_only(request):
        raise InputError(*_without_streaming(request, placement.strategy))
    reasons += placement.reasons
    if placement.strategy == "streamed" and request.precision.gradients == "auto" and not model.adapter.trains:
        reasons.append(f"precision.gradients = {_gradients_reason(placement.streaming)}")
    return Plan(
        run_dir=str(Path(request.run_dir).expanduser()),
        model=model,
        data=_data(request.data, request.model, model, machine, reasons),
        train=_train(request, micro_batches, compiled),
        precision=PrecisionPlan(
            compute=request.precision.compute,
            initial_loss_scale=request.precision.initial_loss_scale if request.precision.compute == "fp16" else 1.0,
        ),
        memory=MemoryPlan(
            strategy=placement.strategy,
            activations=placement.activations,
            loss_chunk=request.memory.loss_chunk,
            gpu_limit=request.memory.gpu_limit or 0,
            host_limit=request.memory.host_limit or 0,
            streaming=placement.streaming,
            ledger=placement.ledger,
        ),
        parallel=ParallelPlan(
            workers=workers,
            device=device,
            hang_after_s=request.parallel.hang_after_s,
            peak_flops=_peak_flops(machine, device, workers, request.precision.compute),
        ),
        checkpoint=_checkpoint(request, reasons),
        log=_log(request, interactive, reasons),
        reasons=tuple(reasons),
    )


def _model(section: ModelSection, read: ModelPlan | None, reasons: list[str]) -> ModelPlan:
    """What is trained, the adapter decided."""
    if read is None:
        read, why = read_model(section)
        _note(reasons, why)
    return read.model_copy(update={"adapter": plan_adapter(section.adapter, read, reasons)})


def _note(reasons: list[str], reason: str | None) -> None:
    if reason:
        reasons.append(reason)


def _length_problems(request: RunConfig, model: ModelPlan) -> list[str]:
    length, most = request.data.sequence_length, model.shape.max_positions
    if length <= most:
        return []
    field = "n_positions" if model.shape.family == "gpt2" else "max_position_embeddings"
    return [
        f"data.sequence_length: {length} is longer than the {most} positions that {model.source} was made for; "
        f"use {most} or less, or ask for scaling in model.overrides (rope_scaling, or {field} for random weights)"
    ]


def _format_problems(request: RunConfig, device: Device, workers: int, machine: Machine) -> list[str]:
    compute = request.precision.compute
    if compute == "fp16" and device == "cpu":
        return ["precision.compute: fp16 needs a GPU (loss scaling and fp16 kernels are CUDA's); use fp32 on a CPU"]
    if compute == "bf16" and device == "cuda":
        old = [gpu.name for gpu in machine.gpus[:workers] if gpu.capability < (8, 0)]
        if old:
            return [f"precision.compute: bf16 needs compute capability 8.0, and {old[0]} has less; use fp16"]
    return []


def _note_batches(reasons: list[str], request: RunConfig, micro_batches: int, workers: int) -> None:
    tokens = micro_batches * request.train.micro_batch * request.data.sequence_length
    if tokens != request.train.tokens_per_step:
        reasons.append(
            f"train.tokens_per_step = {tokens}: {request.train.tokens_per_step} rounded to {micro_batches} whole micro-batches"
        )
    if workers > micro_batches:
        reasons.append(
            f"{workers - micro_batches} of {workers} workers have no micro-batch: a step has {micro_batches}; "
            "lower train.micro_batch or raise train.tokens_per_step"
        )


def _compiled(request: RunConfig, device: Device, reasons: list[str]) -> bool:
    if request.precision.compute == "bf16" and device == "cpu":
        reasons.append("precision.compute = bf16 is slow on most CPUs; fp32 is faster there")
    if request.train.compile != "auto":
        return request.train.compile
    reasons.append(
        f"train.compile = {'true: blocks are compiled on GPUs' if device == 'cuda' else 'false: not worth its time on a CPU'}"
    )
    return device == "cuda"


def _peak_flops(machine: Machine, device: Device, workers: int, compute: str) -> float:
    """Of the slowest card used; 0 where one is not in the catalogue, so that nothing is reported against a guess."""
    if device == "cpu":
        return 0.0
    return min(gpu_peak(gpu.name, compute) or 0.0 for gpu in machine.gpus[:workers])


def _speed(machine: Machine, device: Device, compute: ComputeDtype) -> Speed | None:
    """Of the first card, where it was measured or is in the catalogue."""
    try:
        return speed_of(machine, compute) if device == "cuda" else None
    except InputError:
        return None


def _footprint(request: RunConfig, device: Device, workers: int, micro_batches: int, compiled: bool) -> Footprint:
    """What memory depends on; strategy and activations are placeholders that `place` goes through."""
    return Footprint(
        strategy="resident",
        activations="keep",
        compute=request.precision.compute,
        compiled=compiled,
        device=device,
        workers=workers,
        micro_batch=request.train.micro_batch,
        micro_batches=micro_batches,
        sequence_length=request.data.sequence_length,
        loss_chunk=request.memory.loss_chunk,
        streaming=_streaming(request, workers),
    )


def _streaming(request: RunConfig, workers: int) -> StreamingPlan:
    """What the recipe decides of it. Several workers sum before they update, which is at the next fetch."""
    trained = request.model.adapter.kind == "none"  # an adapter is on the card, and updated at the end of a step
    at_once = trained and request.train.clip_norm == 0 and request.precision.compute != "fp16" and workers == 1
    gradients = request.precision.gradients
    if gradients == "auto":
        gradients = "bf16" if request.precision.compute == "bf16" else "fp32"
    return StreamingPlan(
        waves=1 if request.memory.waves == "auto" else request.memory.waves,
        moments=request.train.optimizer.state,
        gradients="bf16" if gradients == "bf16" else "master",
        update="in_backward" if at_once else "next_fetch",
        slices=(1,) * workers if workers > 1 else (),
    )


def _gradients_reason(streaming: StreamingPlan) -> str:
    return "bf16: as precision.compute" if streaming.gradients == "bf16" else "as the master weights"


def _without_streaming(request: RunConfig, strategy: str) -> list[str]:
    how = f"memory.strategy: auto chose {strategy}" if request.memory.strategy == "auto" else f"memory.strategy is {strategy}"
    return [
        f"{key}: {value} is for memory.strategy: streamed alone, and {how}; set memory.strategy: streamed, or remove {key}"
        for key, value in streamed_only(request).items()
    ]


def _data(section: DataSection, asked: ModelSection, model: ModelPlan, machine: Machine, reasons: list[str]) -> DataPlan:
    tokenizer = str(Path(section.tokenizer).expanduser()) if section.tokenizer.startswith("~") else section.tokenizer
    if section.tokenizer == "auto":
        tokenizer = _model_tokenizer(asked, model)
        reasons.append(f"data.tokenizer = {tokenizer}: the model's own")
    if hub.is_name(tokenizer) and not Path(tokenizer).exists():
        tokenizer = str(hub.cached(tokenizer, "data.tokenizer", hub.TOKENIZER) or tokenizer)
    folder = Path(section.cache_dir).expanduser()
    if section.cache_dir == "auto":
        folder = cache_dir()
        reasons.append(f"data.cache_dir = {folder}: $MULETRAIN_CACHE or ~/.cache/muletrain")
    processes = section.processes
    if processes == "auto":
        processes = machine.cores
        reasons.append(f"data.processes = {processes}: one a core")
    return DataPlan(
        source=tuple(str(Path(source).expanduser()) if source.startswith("~") else source for source in section.source),
        tokenizer=tokenizer,
        text_key=section.text_key,
        sequence_length=section.sequence_length,
        packing=section.packing,
        validation_fraction=section.validation_fraction,
        bad_rows=section.bad_rows,
        cache_dir=str(folder),
        processes=processes,
    )


def _model_tokenizer(asked: ModelSection, model: ModelPlan) -> str:
    if asked.source not in model_names():
        return model.source
    tokenizer = model_tokenizer(asked.source)
    if tokenizer is None:
        raise InputError(
            f"data.tokenizer: {asked.source} is a shape without a tokenizer of its own; give a folder, a tokenizer.json "
            "or a hub name"
        )
    return tokenizer


def _train(request: RunConfig, micro_batches: int, compiled: bool) -> TrainPlan:
    train = request.train
    return TrainPlan(
        steps=train.steps or 0,
        epochs=train.epochs or 0,
        micro_batch=train.micro_batch,
        micro_batches=micro_batches,
        clip_norm=train.clip_norm,
        seed=train.seed,
        evaluate_every=train.evaluate_every,
        evaluate_sequences=train.evaluate_sequences,
        compile=compiled,
        optimizer=train.optimizer,
        schedule=train.schedule,
    )


def _checkpoint(request: RunConfig, reasons: list[str]) -> CheckpointPlan:
    section = request.checkpoint
    dtype = section.model_dtype
    if dtype == "auto":
        dtype = "fp32" if request.precision.compute == "fp64" else request.precision.compute
        reasons.append(f"checkpoint.model_dtype = {dtype}: as precision.compute")
    return CheckpointPlan(every=section.every, keep=section.keep, resume=section.resume, model_dtype=dtype)


def _log(request: RunConfig, interactive: bool, reasons: list[str]) -> LogPlan:
    console = request.log.console
    if console == "auto":
        console = "bar" if interactive else "plain"
        reasons.append(f"log.console = {console}: {'a terminal' if interactive else 'not a terminal'}")
    return LogPlan(every=request.log.every, console=console)
