"""An adapter as the folder that peft writes and reads: adapter_model.safetensors, adapter_config.json and the tokenizer.

The folder names its base and does not hold it. Rejected: PeftModel.save_pretrained, which needs the whole model in one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from muletrain.models.build import build_hf
from muletrain.models.causal import parameter_names
from muletrain.models.export import copy_tokenizer
from muletrain.models.lora import inject, matrix_of, stored_name
from muletrain.models.weights import WeightSource
from muletrain.spec.errors import InputError

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def is_adapter(folder: Path) -> bool:
    """The folder holds an adapter and not a whole model."""
    return (folder / CONFIG).is_file()


def save_adapter_folder(
    folder: Path,
    config: LoraConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype,
    tokenizer_folder: Path | None,
) -> None:
    """Writes `config`, the matrices in `dtype` and the tokenizer to `folder`, which may exist.

    `tensors` gives (canonical name, whole tensor). Raises OSError where the disk refuses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    saved = copy(config)
    saved.inference_mode = True  # as peft does: who loads it means to use it
    saved.target_modules = sorted(config.target_modules or ())
    saved.save_pretrained(str(folder))
    matrices = {stored_name(name): tensor.detach().to("cpu", dtype, copy=True).contiguous() for name, tensor in tensors}
    save_file(matrices, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)  # safetensors lets only the owner read its files
    if tokenizer_folder is not None:
        copy_tokenizer(tokenizer_folder, folder)


def verify_adapter_folder(folder: Path, hf_config: object) -> None:
    """Checks by the headers that plain peft will find every matrix of the adapter, in its shape, for a model of `hf_config`.

    Raises InputError that lists what is missing, has another shape, or belongs to no layer.
    """
    hf: nn.Module = build_hf(hf_config, torch.float32)
    inject(read_config(folder), hf)
    wanted = {stored_name(names[0]): shape for names, shape in parameter_names(hf) if matrix_of(names[0])}
    with safe_open(folder / WEIGHTS, framework="pt", device="cpu") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a mapping
    problems = [
        f"{folder / WEIGHTS}: {name} is {_shape(found.get(name))} and should be {_shape(wanted.get(name))}"
        for name in sorted(found.keys() | wanted.keys())
        if found.get(name) != wanted.get(name)
    ]
    if problems:
        raise InputError(*problems)


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))


def read_config(folder: Path) -> LoraConfig:
    """The adapter's configuration. Raises InputError for one that is not LoRA's or cannot be read."""
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise InputError(f"{folder / CONFIG}: cannot be read as an adapter's configuration: {error}") from error
    if not isinstance(config, LoraConfig):
        raise InputError(f"{folder / CONFIG}: an adapter of kind {config.peft_type} cannot be merged here; only LoRA can")
    config.inference_mode = False
    return config


def base_of(folder: Path) -> str:
    """The model that the adapter belongs to: a folder or a hub name. Raises InputError where the folder does not say."""
    base = read_config(folder).base_model_name_or_path
    if not base:
        raise InputError(f"{folder / CONFIG}: base_model_name_or_path is empty; write the folder or hub name of its base there")
    return base


def merged_tensors(folder: Path, base: WeightSource) -> Iterator[tuple[str, Tensor]]:
    """(name, W + scale x B A in fp32) of the base's parameters in model order, one at a time; those without a matrix unchanged.

    Raises InputError where the adapter has matrices for layers that the base has not.
    """
    config = read_config(folder)
    scale = config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)
    with safe_open(folder / WEIGHTS, framework="pt", device="cpu") as file:
        left = set(file.keys())
        for name in base.names:
            tensor, stem = base.tensor(name), f"base_model.model.{name.removesuffix('.weight')}"
            pair = [f"{stem}.lora_{matrix}.weight" for matrix in "AB"]
            if left.issuperset(pair):
                left.difference_update(pair)
                a, b = (file.get_tensor(matrix).float() for matrix in pair)
                delta = (b @ a) * scale
                tensor = tensor + (delta.t() if config.fan_in_fan_out else delta)
            yield name, tensor
    if left:
        raise InputError(f"{folder / WEIGHTS}: {min(left)} belongs to no layer of its base, {config.base_model_name_or_path}")
