"""CausalModel: a Hugging Face decoder as the strategies see it: embedding and blocks, then head and loss.

The Hugging Face module is used as it is (`hf`); only its loss is replaced, because its own shifts the labels and holds all
logits, and its attention function, because segments must not see each other. Everything goes through `forward`, since under
FSDP2 the root's parameters (embedding, final norm, head) are whole only inside it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from muletrain.models.loss import chunked_cross_entropy
from muletrain.spec.errors import InputError

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def canonical_name(name: str) -> str:
    """Hugging Face's own name of a CausalModel parameter: no `hf.` in front, no wrapper inside."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("hf.")


class CausalModel(nn.Module):
    """A decoder-only language model and its loss."""

    def __init__(self, hf: Any, loss_chunk: int) -> None:
        """Wraps a Transformers causal LM. Raises InputError where it has no list of `num_hidden_layers` decoder layers."""
        super().__init__()
        self.hf: Any = hf
        self.loss_chunk = loss_chunk
        """Rows whose logits exist at once."""
        self._layers_path = _find_layers(hf)
        self._ties = [names for names, _ in parameter_names(hf) if len(names) > 1]

    @property
    def config(self) -> Any:
        """The Hugging Face configuration."""
        return self.hf.config

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder blocks in order. Items may be replaced."""
        return self.hf.get_submodule(self._layers_path)

    @property
    def head(self) -> nn.Module:
        """The output embedding: weight [V, H] and, in few families, a bias [V]."""
        return self.hf.get_output_embeddings()

    @property
    def tied(self) -> bool:
        """The head's weight is the input embedding's."""
        return self.head.weight is self.hf.get_input_embeddings().weight

    @property
    def has_dropout(self) -> bool:
        """Whether training draws random numbers."""
        rates = [module.p for module in self.hf.modules() if isinstance(module, nn.Dropout)]
        rates += [getattr(self.config, field, None) or 0.0 for field in ("attention_dropout", "attn_pdrop")]
        return any(rate > 0.0 for rate in rates)

    def tie_weights(self) -> None:
        """Makes tied weights one parameter again, under their first name; `to_empty` parts them."""
        for first, *others in self._ties:
            parameter = self.hf.get_parameter(first)
            for name in others:
                owner, _, leaf = name.rpartition(".")
                setattr(self.hf.get_submodule(owner), leaf, parameter)

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """[B, S] int64 -> [B, S, H]: embedding, blocks and final norm. `cu_seqlens` as in MicroBatch."""
        output = self.hf.base_model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen
        )
        return output.last_hidden_state

    def head_loss(self, hidden: Tensor, labels: Tensor, grad_scale: float = 1.0) -> Tensor:
        """Sum of cross entropy over labels != -100: [B, S, H], [B, S] -> scalar in fp32 (fp64 for fp64), nats.

        Label t belongs to position t: nothing is shifted here. The gradients, not the value, come multiplied by `grad_scale`.
        """
        bias = getattr(self.head, "bias", None)
        return chunked_cross_entropy(
            hidden.flatten(0, 1), self.head.weight, labels.flatten(), self.loss_chunk, bias, grad_scale
        )

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        grad_scale: float = 1.0,
    ) -> Tensor:
        """`head_loss` of `hidden_states`."""
        return self.head_loss(self.hidden_states(input_ids, position_ids, cu_seqlens, max_seqlen), labels, grad_scale)


def parameter_names(hf: nn.Module) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """(all canonical names, shape) of each parameter in model order; tied names share an entry."""
    names: dict[int, list[str]] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    for name, parameter in hf.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(canonical_name(name))
        shapes[id(parameter)] = tuple(parameter.shape)
    return [(tuple(aliases), shapes[key]) for key, aliases in names.items()]


def _find_layers(hf: Any) -> str:
    count = hf.config.num_hidden_layers
    for name, module in hf.named_modules():
        is_list = isinstance(module, nn.ModuleList) and len(module) == count
        if is_list and all(isinstance(layer, GradientCheckpointingLayer) for layer in module):
            return str(name)
    raise InputError(
        f"model.source: {hf.config.model_type} has no list of {count} decoder layers; "
        "families that work: llama (LLaMA, DeepSeek-LLM), qwen3, gpt2 and others built like them"
    )
