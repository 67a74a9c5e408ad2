"""The shape of a published row: "L32 h4096 ffn11008 heads32 kv32 vocab32000 untied", or a catalogue model by its name."""

from __future__ import annotations

import re

from muletrain.bench.point_trainer import UnmodelledError
from muletrain.catalog.families import model_shape
from muletrain.catalog.models import catalogue_name, model_config, model_names
from muletrain.spec.model_shape import ModelShape


def read_shape(model: str, architecture: str, parameters: float) -> ModelShape:
    """`parameters` (0: not stated) decides what the text leaves open: gates, words, tied heads. Raises UnmodelledError."""
    known = catalogue_name(model) or next((name for name in model_names() if name == model.lower()), None)
    if known:
        shape = model_shape(model_config(known), known)
        if not parameters or abs(shape.parameters / parameters - 1) < 0.05:
            return shape
    fields = {
        key: int(value) for key, value in re.findall(r"\b(L|h|ffn|heads|kv|vocab|experts|top|head dim )(\d+)", architecture)
    }
    if "L" not in fields or "h" not in fields or "heads" not in fields:
        raise UnmodelledError("architecture not stated")
    hidden, layers, heads = fields["h"], fields["L"], fields["heads"]
    plain = re.search(r"GPT-2|GPT-3|GELU|example model|vocab50257", architecture) is not None
    ffn = fields.get("ffn", 4 * hidden)
    head_dim = fields.get("head dim ", hidden // heads)
    kv = fields.get("kv", heads)
    experts, active = fields.get("experts", 0), fields.get("top", 0)
    candidates = []
    for gated in (False,) if plain or "ffn" not in fields else (True, False):
        for tied in _tied(architecture):
            vocab = fields.get("vocab") or _vocabulary(architecture, hidden, layers, ffn, gated, tied, parameters)
            candidates.append(_shape(model, hidden, layers, heads, kv, head_dim, ffn, vocab, tied, gated, experts, active))
    if not parameters:
        return candidates[0]
    best = min(candidates, key=lambda shape: abs(shape.parameters / parameters - 1))
    if abs(best.parameters / parameters - 1) > 0.1:
        raise UnmodelledError("architecture and parameter count do not agree")
    return best


def _tied(architecture: str) -> tuple[bool, ...]:
    if "untied" in architecture:
        return (False,)
    return (True,) if "tied" in architecture else (False, True)


def _vocabulary(architecture: str, hidden: int, layers: int, ffn: int, gated: bool, tied: bool, parameters: float) -> int:
    if "GPT-2 style" in architecture:
        return 51200
    left = parameters - layers * (4 * hidden + (3 if gated else 2) * ffn) * hidden
    return max(1024, round(left / hidden / (1 if tied else 2)))


def _shape(
    name: str, hidden: int, layers: int, heads: int, kv: int, head_dim: int, ffn: int, vocab: int, tied: bool, gated: bool,
    experts: int, active: int,
) -> ModelShape:  # fmt: skip
    width, kv_width = heads * head_dim, kv * head_dim
    attention = hidden * (2 * width + 2 * kv_width)
    one = (3 if gated else 2) * hidden * ffn
    block = attention + one * (experts or 1) + hidden * experts + 2 * hidden
    idle = layers * one * max(0, experts - active)
    return ModelShape(
        name=name,
        family="published",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv,
        head_dim=head_dim,
        ffn=ffn * (active or 1),
        vocab=vocab,
        tied=tied,
        max_positions=2**20,
        parameters=layers * block + vocab * hidden * (1 if tied else 2) + hidden,
        block_parameters=block,
        matmul_parameters=layers * (block - 2 * hidden) - idle + vocab * hidden,
        experts=experts,
        active_experts=active,
        idle_parameters=idle,
        gated=gated,
    )
