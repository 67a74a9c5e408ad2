"""One field of a Hugging Face config, or the error that says what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muletrain.spec.errors import InputError

Config = Mapping[str, Any]


def whole(config: Config, name: str, field: str, default: int | None = None) -> int:
    """A count of at least 1. Raises InputError naming model `name` and the field where it is absent or no such number."""
    value = config.get(field)
    value = default if value is None else value
    if value is None:
        raise InputError(f"model {name}: its config has no {field}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"model {name}: {field} is {value!r} in its config; it must be a whole number of at least 1")
    return value


def divides(name: str, large: tuple[str, int], small: tuple[str, int]) -> None:
    """Raises InputError unless one field is a multiple of the other; each as (field, value)."""
    if large[1] % small[1]:
        raise InputError(f"model {name}: {large[0]} ({large[1]}) must be a multiple of {small[0]} ({small[1]})")


def positions(config: Config, name: str) -> int:
    """Positions the model is made for, with rope scaling where the config asks for one."""
    plain = whole(config, name, "max_position_embeddings", 2048)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("default", "llama3"):  # llama3: max_position_embeddings is the scaled length already
        return plain
    return max(plain, int(float(rope.get("factor") or 1.0) * int(rope.get("original_max_position_embeddings") or plain)))


def window(config: Config, name: str) -> int:
    """Positions that attention looks back on in every layer; 0 where that is all of them in some layer or in each."""
    asked = config.get("sliding_window")
    if not asked or config.get("use_sliding_window") is False:
        return 0
    types = config.get("layer_types")
    if types is not None and set(types) != {"sliding_attention"}:
        return 0
    return whole(config, name, "sliding_window")
