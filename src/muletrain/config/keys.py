"""The recipe's keys as a table, read off RunConfig once: what is a section, what is a leaf, what a wrong key most likely meant.

Everything that talks about keys (loading, the JSON schema, messages) goes by this table, so a key is added in RunConfig alone.
RESERVED names what the design keeps for later versions: such a key is told apart from a typing error.
"""

from __future__ import annotations

import difflib
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic.fields import FieldInfo

from muletrain.spec.recipe import RunConfig
from muletrain.spec.value import Value

Path = tuple[str, ...]

RESERVED = (
    "model.quantize",
    "train.objective",
    "precision.matmul",
    "precision.master",
    "memory.engine",
    "memory.deepspeed_config",
    "parallel.tensor",
    "parallel.pipeline",
)
"""Keys of the design that this version does not act on. Each stands for itself and all below it."""


ELSEWHERE = {
    "lr": "train.optimizer.learning_rate",
    "batch_size": "train.micro_batch",
    "per_device_train_batch_size": "train.micro_batch",
    "gradient_accumulation_steps": "train.tokens_per_step",
    "global_batch_size": "train.tokens_per_step",
    "max_steps": "train.steps",
    "num_train_epochs": "train.epochs",
    "max_grad_norm": "train.clip_norm",
    "max_seq_length": "data.sequence_length",
    "seq_len": "data.sequence_length",
    "gradient_checkpointing": "memory.activations",
    "output_dir": "run_dir",
    "bf16": "precision.compute",
    "fp16": "precision.compute",
    "offload": "memory.strategy",
    "fsdp": "memory.strategy",
    "zero_stage": "memory.strategy",
    "deepspeed": "memory.strategy",
    "nproc_per_node": "parallel.workers",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "train.evaluate_every",
    "logging_steps": "log.every",
    "resume_from_checkpoint": "checkpoint.resume",
    "model_name_or_path": "model.source",
    "base_model": "model.source",
    "dataset": "data.source",
    "lora": "model.adapter",
    "peft": "model.adapter",
    "finetuning_type": "model.adapter.kind",
    "lora_r": "model.adapter.rank",
    "lora_rank": "model.adapter.rank",
    "lora_alpha": "model.adapter.alpha",
    "lora_dropout": "model.adapter.dropout",
    "lora_target": "model.adapter.targets",
    "lora_target_modules": "model.adapter.targets",
    "target_modules": "model.adapter.targets",
    "use_rslora": "model.adapter.rslora",
}
"""What other trainers call things."""
WORDS_ELSEWHERE = {
    "gpu": "cuda",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "double": "fp64",
    "fsdp": "zero3",
    "ddp": "resident",
    "offload": "streamed",
}
"""The same for values that are words."""


@dataclass(frozen=True)
class Leaf:
    """A key that takes a value. `choices` are the words it accepts, `free` marks a mapping of the user's own names."""

    path: Path
    field: FieldInfo
    choices: tuple[str, ...]
    free: bool

    @property
    def required(self) -> bool:
        """The recipe must give it."""
        return self.field.is_required()

    @property
    def documentation(self) -> str:
        """What it means, on one line."""
        return " ".join((self.field.description or "").split())


def _choices(annotation: Any) -> tuple[str, ...]:
    if typing.get_origin(annotation) is Literal:
        return tuple(str(choice) for choice in typing.get_args(annotation))
    return tuple(choice for part in typing.get_args(annotation) for choice in _choices(part))


def _walk(model: type[Value], prefix: Path, sections: dict[Path, type[Value]], leaves: dict[Path, Leaf]) -> None:
    sections[prefix] = model
    for name, field in model.model_fields.items():
        path = (*prefix, name)
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Value):
            _walk(kind, path, sections, leaves)
        else:
            leaves[path] = Leaf(path, field, _choices(kind), free=typing.get_origin(kind) is dict)


@cache
def table() -> tuple[dict[Path, type[Value]], dict[Path, Leaf]]:
    """(sections, leaves) of RunConfig by path; the root is the empty path."""
    sections: dict[Path, type[Value]] = {}
    leaves: dict[Path, Leaf] = {}
    _walk(RunConfig, (), sections, leaves)
    return sections, leaves


def dotted(path: Path) -> str:
    """train.optimizer.learning_rate"""
    return ".".join(path)


def reserved(path: Path) -> str | None:
    """The reserved key that `path` is, or lies under."""
    return next((key for key in RESERVED if (dotted(path) + ".").startswith(key + ".")), None)


def suggestion(path: Path) -> str | None:
    """The key that an unknown `path` most likely meant: same name first (anywhere), then a similar one (same section first)."""
    sections, leaves = table()
    known = [dotted(key) for key in (*leaves, *sections) if key]
    wanted = dotted(path).lower().replace("-", "_")
    name, parent = wanted.rpartition(".")[2], wanted.rpartition(".")[0]
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    same_name = [key for key in known if key.rpartition(".")[2] == name]
    if same_name:
        return difflib.get_close_matches(wanted, same_name, n=1, cutoff=0.0)[0]
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == parent}
    others = {key.rpartition(".")[2]: key for key in known}
    for names, cutoff in ((siblings, 0.6), (others, 0.75)):
        match = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
        if match:
            return names[match[0]]
    whole = difflib.get_close_matches(wanted, [key for key in known if not wanted.startswith(key)], n=1, cutoff=0.75)
    return whole[0] if whole else None


def unknown_key(path: Path) -> str:
    """The message for a key that does not exist."""
    kept = reserved(path)
    if kept:
        return f"{dotted(path)}: {kept} is part of the design but not in this version; remove it"
    if len(path) == 1 and tuple(path[0].split(".")) in table()[1]:  # dots are for the command line
        return f"{path[0]}: in a recipe, write {path[0].rpartition('.')[2]} indented below {path[0].rpartition('.')[0]}:"
    meant = suggestion(path)
    if meant:
        return f"{dotted(path)}: there is no such key; did you mean {meant}?"
    sections, _ = table()
    nearest = path[:-1]
    while nearest not in sections:
        nearest = nearest[:-1]
    names = ", ".join(sections[nearest].model_fields)
    return f"{dotted(path)}: there is no such key; {dotted(nearest) or 'a recipe'} has {names}"
