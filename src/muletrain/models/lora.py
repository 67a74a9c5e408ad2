"""LoRA (Hu et al. 2021) by the peft library: two small matrices beside each chosen linear layer of a frozen model.

peft's own modules stand in the Hugging Face model, so what is trained is what any user of peft will load. Here is only what a
model on the meta device needs: the layers are put in without values (models.weights gives them, keyed by seed and name, the
same for every split of the work). Names are peft's: q_proj.base_layer.weight, q_proj.lora_A.default.weight.
"""

from __future__ import annotations

import re
from typing import Literal

from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from muletrain.spec.plan import AdapterPlan

ADAPTER = "default"
_MATRIX = re.compile(rf"\.lora_([AB])\.{ADAPTER}\.weight$")


def lora_config(adapter: AdapterPlan, hf: nn.Module) -> LoraConfig:
    """peft's configuration of a plan's adapter for the model `hf`."""
    return LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=adapter.base,
        r=adapter.rank,
        lora_alpha=_whole(adapter.alpha),
        lora_dropout=adapter.dropout,
        target_modules=list(adapter.targets),
        use_rslora=adapter.rslora,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in hf.modules()),
    )


def _whole(alpha: float) -> int | float:
    """peft writes what it is given, and other readers of its files expect a whole number."""
    return int(alpha) if alpha == int(alpha) else alpha


def inject(config: LoraConfig, hf: nn.Module) -> None:
    """Puts matrices without values beside the layers that `config` names, and freezes all else."""
    inject_adapter_in_model(config, hf, ADAPTER, low_cpu_mem_usage=True)


def add_adapter(hf: nn.Module, adapter: AdapterPlan) -> None:
    """Puts the adapter into `hf` (on the meta device) and freezes all else. The new matrices are on the meta device too."""
    inject(lora_config(adapter, hf), hf)
    added = sum(parameter.numel() for parameter in hf.parameters() if parameter.requires_grad)
    if added != adapter.parameters:
        raise RuntimeError(f"the adapter was planned with {adapter.parameters} parameters and has {added}")


def matrix_of(name: str) -> Literal["A", "B"] | None:
    """Which of an adapter's matrices a parameter is; None for the model's own."""
    match = _MATRIX.search(name)
    return None if match is None else "A" if match[1] == "A" else "B"


def base_name(name: str) -> str:
    """The name that a frozen parameter has in the model without an adapter."""
    return name.replace(".base_layer.", ".")


def stored_name(name: str) -> str:
    """The name of an adapter's matrix in peft's files."""
    return "base_model.model." + _MATRIX.sub(r".lora_\1.weight", name)
