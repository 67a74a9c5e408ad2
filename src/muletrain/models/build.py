"""From a plan to a model: built on the meta device, so that no worker ever holds weights it does not own.

A family is refused here, by name, where the rest of the engine would compute something else than Transformers does.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from muletrain.models import attention
from muletrain.models.causal import CausalModel
from muletrain.models.lora import add_adapter
from muletrain.spec.errors import InputError
from muletrain.spec.plan import ModelPlan


def build_on_meta(model: ModelPlan, *, dtype: torch.dtype, loss_chunk: int) -> CausalModel:
    """The plan's model with parameters of `dtype` on the meta device, our attention, training mode.

    If the plan has an adapter it is in the model, and all else is frozen.

    Raises InputError for an unknown family or field, and for a family that needs what our attention or loss cannot do.
    """
    config = load_config(model)
    refuse_unsupported(config)
    hf = build_hf(config, dtype)
    if model.adapter.trains:
        add_adapter(hf, model.adapter)
        hf.to(dtype)
    return CausalModel(hf, loss_chunk)


def build_hf(config: Any, dtype: torch.dtype) -> Any:
    """The Transformers causal LM of a config on the meta device, in training mode, with our attention.

    Raises InputError, naming the family, where its code would not go through our attention or our loss.
    """
    attention.register()
    family = config.model_type
    try:
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype, attn_implementation=attention.NAME)
    except ValueError as error:
        raise InputError(f"model.source: {family} is no causal language model: {error}") from error
    except KeyError as error:
        if error.args != (attention.NAME,):
            raise
        # the family looks our attention up in a table of its own
        raise InputError(f"model.source: {family} computes attention in its own way, so packed documents would mix") from error
    if not hf._supports_attention_backend or any(isinstance(module, nn.Conv1d) for module in hf.modules()):
        raise InputError(f"model.source: {family} mixes positions in its own way, so packed documents would mix")
    if {id(child) for child in hf.children()} != {id(hf.base_model), id(hf.get_output_embeddings())}:
        raise InputError(
            f"model.source: {family} has more than a linear head after its blocks, which the loss here would leave out"
        )
    kept = sorted(set(dict(hf.named_buffers())) & set(hf.state_dict()))
    if kept:
        raise InputError(f"model.source: {family} keeps state in buffers ({kept[0]}), which is not trained here")
    return hf.train()


def load_config(model: ModelPlan) -> Any:
    """The Hugging Face configuration of a plan. Raises InputError naming an unknown family or field, or a wrong value."""
    if not model.config:
        try:
            return AutoConfig.from_pretrained(model.source)
        except (OSError, ValueError) as error:
            raise InputError(f"model.source: the config of {model.source} cannot be read: {error}") from error
    fields = dict(model.config)
    family = fields.pop("model_type", "")
    if family not in CONFIG_MAPPING:
        raise InputError(f"model.source: {family!r} is no family that Transformers knows{_suggestion(family, CONFIG_MAPPING)}")
    _refuse_unknown_fields(CONFIG_MAPPING[family](), fields, model.source)
    try:
        return AutoConfig.for_model(family, **fields)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise InputError(f"model.overrides: {family} refuses its config: {' '.join(str(error).split())}") from error


def _refuse_unknown_fields(default: Any, fields: dict[str, Any], source: str) -> None:
    """A field that the family does not have would be kept and change nothing. What the source's own file says is let pass."""
    file = Path(source) / "config.json"
    own = set(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else set()
    known = set(default.to_dict()) | set(default.attribute_map) | _OLD_FIELDS
    unknown = sorted(set(fields) - own - known)
    if unknown:
        raise InputError(
            *(f"model.overrides.{name}: {default.model_type} has no such field{_suggestion(name, known)}" for name in unknown)
        )


_OLD_FIELDS = {
    "quantization_config",
    "rope_theta",
    "rope_scaling",
    "torch_dtype",
    "head_dim",
    "transformers_version",
    "architectures",
}
"""Understood without being declared: what earlier versions of Transformers wrote, and what quantizers add."""


def _suggestion(word: str, known: Iterable[str]) -> str:
    close = get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def refuse_unsupported(config: Any) -> None:
    """Raises InputError, naming the family and all reasons, where attention or loss would differ from the model's own."""
    reasons = []
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None) or []
    other = sorted(set(types) - {"full_attention", "sliding_attention"})
    if other:
        reasons.append(f"it has layers of kind {', '.join(other)}")
    if "sliding_attention" in types or (window and not types and window < config.max_position_embeddings):
        reasons.append(f"its attention has a sliding window of {window}")
    if getattr(config, "attn_logit_softcapping", None):
        reasons.append("its attention scores are soft-capped")
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        reasons.append("it has ALiBi position biases")
    if config.model_type == "gpt_oss":
        reasons.append("its attention has sinks")
    if getattr(config, "quantization_config", None):
        reasons.append("its weights are quantized")
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("it is not decoder-only")
    for field in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, field, None) not in (None, 1, 1.0):
            reasons.append(f"its logits are changed after the head ({field})")
    if reasons:
        raise InputError(f"model.source: {config.model_type} cannot be trained here: {'; '.join(reasons)}")


def materialize_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Fills the buffers that no weight file holds (rotary frequencies) with what construction gives, in fp32, on `device`.

    Needed after `to_empty`, which leaves garbage in them. A CausalModel's tied weights, which `to_empty` parts, are tied again.
    Raises InputError for a module whose buffers cannot be computed again.
    """
    if isinstance(model, CausalModel):
        model.tie_weights()
    for name, module in model.named_modules():
        transient = sorted(module._non_persistent_buffers_set & set(module._buffers))
        if not transient:
            continue
        fresh = _fresh_copy(name, module)
        for key in transient:
            module._buffers[key] = getattr(fresh, key).to(device)


def _fresh_copy(name: str, module: nn.Module) -> nn.Module:
    """The module built again on the CPU from its own config."""
    required = [
        parameter.name
        for parameter in list(inspect.signature(type(module).__init__).parameters.values())[1:]
        if parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    if required != ["config"] or not hasattr(module, "config"):
        raise InputError(f"model.source: the buffers of {name} ({type(module).__name__}) cannot be computed again")
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            return type(module)(config=module.config)
    finally:
        torch.set_default_dtype(default)
