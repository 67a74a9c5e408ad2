"""A run's model as a Hugging Face folder of its own, for tools that know nothing of runs or adapters.

An adapter is merged into its base a tensor at a time, so the host holds one shard and never the model.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig

from muletrain.models.adapter_folder import base_of, is_adapter, merged_tensors
from muletrain.models.build import build_hf
from muletrain.models.export import save_model_folder, verify_model_folder
from muletrain.models.weights import PretrainedWeights
from muletrain.spec.errors import InputError


def export(folder: Path, target: Path) -> str:
    """Writes the model in `folder` (a whole model or an adapter) to `target`; one line that says what was written.

    A merged model has its base's number format. Raises InputError where `target` is used, or the adapter's base cannot be read.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target}: it exists and is not empty; give a folder that does not exist yet")
    if not is_adapter(folder):
        shutil.copytree(folder, target, dirs_exist_ok=True)
        return f"{folder} copied to {target}"
    base = base_of(folder)
    try:
        config = AutoConfig.from_pretrained(base)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: the adapter's base, {base}, cannot be read: {error}") from error
    dtype = config.dtype or torch.float32
    weights = PretrainedWeights(base, build_hf(config, dtype))
    source = Path(base)
    save_model_folder(
        target,
        config,
        merged_tensors(folder, weights),
        dtype=dtype,
        tokenizer_folder=folder if (folder / "tokenizer_config.json").is_file() else None,
        generation_from=source if source.is_dir() else None,
    )
    verify_model_folder(target)
    return f"{folder} merged into {base} and written to {target} in {str(dtype).removeprefix('torch.')}"
