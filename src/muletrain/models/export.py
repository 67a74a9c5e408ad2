"""Writes a model as an ordinary Hugging Face folder, a tensor at a time, and proves that it can be read back.

The tensors arrive one by one from a strategy, which gathers each over all workers; only one is ever held. Rejected:
`save_pretrained`, which needs the whole model in one place.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from muletrain.models.build import build_hf
from muletrain.models.causal import parameter_names
from muletrain.models.shards import DTYPES, Shards
from muletrain.models.weights import INDEX, SINGLE, locate_tensors
from muletrain.spec.errors import InputError

SHARD_BYTES = 5 * 2**30
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)


def save_model_folder(
    folder: Path,
    config: Any,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype,
    tokenizer_folder: Path | None,
    generation_from: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    write: bool = True,
) -> None:
    """Writes config, weights in `dtype`, generation settings and tokenizer to `folder`, which may exist.

    `tensors` gives (Hugging Face name, whole tensor), a tied weight once; drawing from it is collective, so every worker calls
    this and only one passes `write=True` (the others just draw). `tokenizer_folder` is a folder or a tokenizer.json;
    `generation_from` a model folder whose generation_config.json is kept. The host holds one tensor.
    Raises OSError where the disk refuses, ValueError where a tensor is missing or is none of the model's.
    """
    if not write:
        for _ in tensors:
            pass
        return
    folder.mkdir(parents=True, exist_ok=True)
    _write_config(folder, config, dtype)
    _write_weights(folder, Shards(folder, _announced(config, dtype), dtype, shard_bytes), tensors)
    _write_generation_config(folder, config, generation_from)
    if tokenizer_folder is not None:
        copy_tokenizer(tokenizer_folder, folder)


def verify_model_folder(folder: Path) -> None:
    """Checks by the headers that plain Transformers will find every tensor of the model, in its shape and dtype.

    Raises InputError that lists what is missing, has another shape or dtype, or belongs to no parameter.
    """
    config = AutoConfig.from_pretrained(folder)
    dtype = config.dtype or torch.float32
    where = locate_tensors(str(folder))
    found = {name: _header(path, name) for name, path in where.items()}
    problems = []
    for names, shape in parameter_names(build_hf(config, dtype)):
        stored = found.pop(names[0], None)
        if stored is None:
            problems.append(f"{folder}: {names[0]} is missing")
        elif stored != (shape, DTYPES[dtype]):
            problems.append(f"{folder}: {names[0]} is {stored[1]} {list(stored[0])}, not {DTYPES[dtype]} {list(shape)}")
    problems += [f"{folder}: {name} belongs to no parameter of the model" for name in found]
    if problems:
        raise InputError(*problems)


def _header(path: Path, name: str) -> tuple[tuple[int, ...], str]:
    with safe_open(path, framework="pt", device="cpu") as file:
        part = file.get_slice(name)
        return tuple(part.get_shape()), part.get_dtype()


def _announced(config: Any, dtype: torch.dtype) -> list[tuple[str, tuple[int, ...]]]:
    return [(names[0], shape) for names, shape in parameter_names(build_hf(config, dtype))]


def _write_weights(folder: Path, shards: Shards, tensors: Iterable[tuple[str, Tensor]]) -> None:
    parameters = 0
    for name, tensor in tensors:
        shards.put(name, tensor)
        parameters += tensor.numel()
        del tensor  # gone before the next one is made
    if shards.missing:
        raise ValueError(f"{len(shards.missing)} tensors of the model were not given, {shards.missing[0]} among them")
    for stale in (*folder.glob("model*.safetensors"), folder / INDEX):
        stale.unlink(missing_ok=True)
    if len(shards.files) == 1:
        shards.files[0][0].rename(folder / SINGLE)
        return
    weight_map = {}
    for number, (path, names) in enumerate(shards.files, start=1):
        final = f"model-{number:05d}-of-{len(shards.files):05d}.safetensors"
        path.rename(folder / final)
        weight_map.update(dict.fromkeys(names, final))
    metadata = {"total_parameters": parameters, "total_size": parameters * shards.itemsize}
    _write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})


def _write_config(folder: Path, config: Any, dtype: torch.dtype) -> None:
    saved = deepcopy(config)
    saved.dtype = dtype
    saved.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    saved.save_pretrained(folder)


def _write_generation_config(folder: Path, config: Any, generation_from: Path | None) -> None:
    kept = generation_from / "generation_config.json" if generation_from else None
    if kept is not None and kept.is_file():
        shutil.copyfile(kept, folder / "generation_config.json")
    else:
        GenerationConfig.from_model_config(config).save_pretrained(folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copies tokenizer files and chat templates as they are. Raises InputError where `source` has none."""
    if source.is_file():
        shutil.copyfile(source, folder / "tokenizer.json")
    else:
        present = [name for name in _TOKENIZER_FILES if (source / name).is_file()]
        if not present:
            raise InputError(f"data.tokenizer: {source} holds no tokenizer file ({', '.join(_TOKENIZER_FILES[:3])}, ...)")
        for name in present:
            shutil.copyfile(source / name, folder / name)
        templates = source / "additional_chat_templates"
        if templates.is_dir():
            shutil.copytree(templates, folder / templates.name, dirs_exist_ok=True)
    if not (folder / "tokenizer_config.json").is_file():
        # without it Transformers picks a tokenizer class by the model's family, which may change the splitting
        _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
