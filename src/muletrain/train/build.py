"""The composition root: the one place where a Plan becomes live parts and hooks get their order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor

from muletrain.checkpoint.save import ModelWriter
from muletrain.data.dataset import open_prepared
from muletrain.data.stream import TrainingStream
from muletrain.metrics.events import EventSink
from muletrain.models.adapter_folder import save_adapter_folder, verify_adapter_folder
from muletrain.models.build import build_on_meta
from muletrain.models.export import save_model_folder, verify_model_folder
from muletrain.models.lora import lora_config
from muletrain.models.weights import open_weights
from muletrain.precision.policy import precision_of
from muletrain.spec.place import WorkerPlace
from muletrain.spec.plan import Plan
from muletrain.strategy.apply import build_strategy
from muletrain.strategy.contract import Strategy
from muletrain.train.console import Console
from muletrain.train.hooks import Checkpointing, Evaluation, Events, Log
from muletrain.train.loop import Hook, Run
from muletrain.train.record import CommunicationProfile, Record

EVENTS, RECORD, CHECKPOINTS = "events.jsonl", "record.json", "checkpoints"


@dataclass(frozen=True)
class Session:
    """What one start adds to the plan."""

    data: Path
    """The prepared data set."""
    stop_after: int = 0
    """Updates after which to save and stop, as a signal would; 0: no."""
    profile_steps: int = 0
    """Steps to profile on GPUs for the communication share; 0: none."""
    measure_only: bool = False
    """Neither evaluate nor save: a benchmark leaves no model."""


@dataclass(frozen=True)
class Parts:
    """The live parts of one worker."""

    strategy: Strategy
    stream: TrainingStream
    data_fingerprint: str
    write_model: ModelWriter
    unexpected: tuple[str, ...]
    """Tensors in the model's files that it has no place for."""


def build_parts(plan: Plan, data: Path, device: torch.device) -> Parts:
    """Data, model and strategy. Collective."""
    prepared = open_prepared(data)
    stream = TrainingStream(
        prepared,
        sequence_length=plan.data.sequence_length,
        packing=plan.data.packing,
        micro_batch=plan.train.micro_batch,
        micro_batches=plan.train.micro_batches,
        seed=plan.train.seed,
    )
    compute = precision_of(plan.precision.compute).compute
    model = build_on_meta(plan.model, dtype=compute, loss_chunk=plan.memory.loss_chunk)
    config = model.config
    weights = open_weights(plan.model, model, plan.train.seed)
    adapter = lora_config(plan.model.adapter, model.hf) if plan.model.adapter.trains else None
    strategy = build_strategy(plan, model, weights, device)
    return Parts(strategy, stream, prepared.manifest.content, _model_writer(plan, config, adapter), weights.unexpected)


_EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _model_writer(plan: Plan, config: Any, adapter: LoraConfig | None) -> ModelWriter:
    source, tokenizer = Path(plan.model.source), Path(plan.data.tokenizer)
    dtype = _EXPORT_DTYPES[plan.checkpoint.model_dtype]
    tokenizer_folder = tokenizer if tokenizer.exists() else None

    def write(folder: Path, parameters: Iterator[tuple[str, Tensor]]) -> None:
        if adapter is not None:
            save_adapter_folder(folder, adapter, parameters, dtype=dtype, tokenizer_folder=tokenizer_folder)
            verify_adapter_folder(folder, config)
            return
        save_model_folder(
            folder,
            config,
            parameters,
            dtype=dtype,
            tokenizer_folder=tokenizer_folder,
            generation_from=source if source.is_dir() else None,
        )
        verify_model_folder(folder)

    return write


def build_log(plan: Plan, place: WorkerPlace) -> Log:
    """Worker 0 shows and writes; the others do neither."""
    if place.rank != 0:
        return Log(None, Console("quiet"))
    console = Console(plan.log.console)
    return Log(EventSink(Path(plan.run_dir) / EVENTS, console.warn), console)


def build_hooks(run: Run, parts: Parts, session: Session, log: Log) -> list[Hook]:
    """THE order of hooks: events, evaluation, checkpoint, profile, record."""
    folder = Path(run.plan.run_dir)
    batches, text_bytes = parts.stream.evaluation(run.plan.train.evaluate_sequences, run.worker, run.workers)
    evaluation = Evaluation(batches, text_bytes, log)
    on_disk = (run.progress.update, run.progress.window) if run.resumed else None
    profile = CommunicationProfile(session.profile_steps)
    lasting = [evaluation, Checkpointing(folder / CHECKPOINTS, parts.write_model, log, on_disk)]
    return [
        Events(log),
        *([] if session.measure_only else lasting),
        profile,
        Record(folder / RECORD, log, evaluation, profile),
    ]
