"""Where a model's first values come from: safetensors files or keyed random numbers, one tensor at a time.

A worker asks for the tensors it owns, whole, and cuts its share; nobody holds the model. Random values depend on (seed,
parameter name) alone, so every split of the work starts from the same model. They are drawn by the family's own
`_init_weights`, so depth-scaled rules (GPT-2's) hold. Pickle files are never read: they can run code.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from muletrain.models.build import build_hf
from muletrain.models.causal import CausalModel, canonical_name, parameter_names
from muletrain.models.lora import base_name, matrix_of
from muletrain.spec.errors import InputError
from muletrain.spec.plan import ModelPlan

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class WeightSource(Protocol):
    """A model's first values."""

    names: tuple[str, ...]
    """Every parameter's Hugging Face name in model order; a tied weight once, under its first name."""
    unexpected: tuple[str, ...]
    """Tensors in the files that the model has no place for."""

    def tensor(self, name: str) -> Tensor:
        """The whole tensor on the CPU in fp32. Raises KeyError for a name that is not in `names`."""


def open_weights(model_plan: ModelPlan, model: CausalModel, seed: int) -> WeightSource:
    """The source the plan asks for. Raises InputError where files are absent, incomplete or of other shapes."""
    adapted = model_plan.adapter.trains
    source: WeightSource
    if model_plan.weights == "random":
        source = RandomWeights(model.config, seed)
    else:
        source = PretrainedWeights(model_plan.source, build_hf(model.config, torch.float32) if adapted else model.hf)
    return AdapterWeights(source, model, seed) if adapted else source


class RandomWeights:
    """Values drawn by the family's own rules from a generator keyed by (seed, name)."""

    def __init__(self, config: Any, seed: int) -> None:
        self._twin = build_hf(config, torch.float32)  # our own: the caller's model is soon sharded or on a card
        self._seed = seed
        self._shapes = {name: parameter.shape for name, parameter in self._twin.named_parameters()}
        self.names = tuple(self._shapes)
        self.unexpected: tuple[str, ...] = ()

    @torch.no_grad()
    def tensor(self, name: str) -> Tensor:
        """See WeightSource. All parameters but this one are on the meta device, where drawing does nothing."""
        owner_name, _, leaf = name.rpartition(".")
        owner = self._twin.get_submodule(owner_name)
        absent = owner._parameters[leaf]
        drawn = nn.Parameter(torch.full(self._shapes[name], torch.nan), requires_grad=False)
        owner._parameters[leaf] = drawn
        state = torch.get_rng_state()
        # not torch.manual_seed, which would also reseed the GPUs
        torch.default_generator.manual_seed(_key(self._seed, name))
        try:
            for module, rules in self._chain(owner_name):
                rules._init_weights(module)
        finally:
            torch.set_rng_state(state)
            owner._parameters[leaf] = absent
        if drawn.isnan().any():
            raise InputError(f"model.weights: {self._twin.config.model_type} has no rule for random values of {name}")
        return drawn.detach()

    def _chain(self, owner_name: str) -> list[tuple[nn.Module, Any]]:
        """The owner and its ancestors, innermost first, each with the sub-model whose rules apply: Transformers' own order."""
        chain: list[tuple[nn.Module, Any]] = []
        module: nn.Module = self._twin
        rules: nn.Module = self._twin
        chain.append((module, rules))
        for part in owner_name.split("."):
            module = getattr(module, part)
            if isinstance(module, PreTrainedModel):
                rules = module
            chain.append((module, rules))
        return chain[::-1]


class AdapterWeights:
    """A model with an adapter: its base's values, A uniform as peft draws it (Kaiming, a = sqrt 5), B zero."""

    def __init__(self, base: WeightSource, model: CausalModel, seed: int) -> None:
        self._base, self._seed = base, seed
        self._shapes = {canonical_name(name): parameter.shape for name, parameter in model.named_parameters()}
        self.names = tuple(self._shapes)
        self.unexpected = base.unexpected

    def tensor(self, name: str) -> Tensor:
        """See WeightSource."""
        matrix, shape = matrix_of(name), self._shapes[name]
        if matrix is None:
            return self._base.tensor(base_name(name))
        if matrix == "B":
            return torch.zeros(shape)
        generator = torch.Generator().manual_seed(_key(self._seed, name))
        bound = 1.0 / math.sqrt(shape[1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"weights/{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class PretrainedWeights:
    """Values from a folder's (or hub repository's) safetensors, opened as needed."""

    def __init__(self, source: str, hf: nn.Module) -> None:
        self._files: dict[Path, Any] = {}
        self._where = locate_tensors(source)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._stored: dict[str, str] = {}
        missing, used = [], set()
        for aliases, shape in parameter_names(hf):
            name = aliases[0]
            found = [key for alias in aliases for key in _spellings(alias, hf) if key in self._where]
            self._shapes[name] = shape
            if found:
                self._stored[name] = found[0]
                used.update(found)
            else:
                missing.append(name)
        if missing:
            listed = ", ".join(missing[:10]) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
            raise InputError(f"model.source: {source} lacks {len(missing)} of the model's tensors: {listed}")
        ignorable = [*(hf._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
        self.names = tuple(self._shapes)
        self.unexpected = tuple(
            key for key in self._where if key not in used and not any(re.search(pattern, key) for pattern in ignorable)
        )

    def tensor(self, name: str) -> Tensor:
        """See WeightSource."""
        key = self._stored[name]
        value: Tensor = self._open(self._where[key]).get_tensor(key)
        if tuple(value.shape) != self._shapes[name] or not value.is_floating_point():
            raise InputError(
                f"{self._where[key]}: {key} is {list(value.shape)} {value.dtype}, the model needs {list(self._shapes[name])}"
            )
        return value.float()

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = _opened(path)
        return self._files[path]


def _spellings(name: str, hf: nn.Module) -> tuple[str, ...]:
    """A name as it may stand in a file: with or without the base model's prefix (`transformer.`, `model.`)."""
    prefix = f"{hf.base_model_prefix}."
    return (name, name.removeprefix(prefix) if name.startswith(prefix) else prefix + name)


def locate_tensors(source: str) -> Mapping[str, Path]:
    """Tensor name -> its file, for a folder or hub name. Raises InputError where there are no safetensors."""
    index = _fetch(source, INDEX)
    if index is not None:
        weight_map = _weight_map(index)
        shards = {shard: _fetch(source, shard) for shard in sorted(set(weight_map.values()))}
        absent = [shard for shard, path in shards.items() if path is None]
        if absent:
            raise InputError(f"model.source: {source} names shards in {INDEX} that are not there: {', '.join(absent)}")
        return {name: path for name, shard in weight_map.items() if (path := shards[shard]) is not None}
    single = _fetch(source, SINGLE)
    if single is None:
        raise InputError(
            f"model.source: {source} has no {SINGLE} (or {INDEX}); other weight formats are not read, convert it first, "
            "or say model.weights=random"
        )
    with _opened(single) as file:
        return dict.fromkeys(file.keys(), single)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{index}: not an index of shards ({type(error).__name__}: {error}); fetch or copy it again") from None
    return weight_map


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a whole safetensors file ({error}); fetch or copy it again") from None


def _fetch(source: str, filename: str) -> Path | None:
    folder = Path(source)
    if folder.is_dir():
        path = folder / filename
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(source, filename))
    except EntryNotFoundError:
        return None
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise InputError(f"model.source: {source} is no folder here and cannot be fetched by that name: {error}") from error
