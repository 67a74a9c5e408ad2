"""Catalogue models: shapes of published decoders by name, as Hugging Face config fields."""

from __future__ import annotations

import copy
import difflib
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from muletrain.spec.errors import InputError


@cache
def _entries() -> dict[str, dict[str, Any]]:
    text = files("muletrain.catalog").joinpath("data/models.yaml").read_text(encoding="utf-8")
    entries: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return entries


def model_names() -> tuple[str, ...]:
    """All catalogue names."""
    return tuple(_entries())


def model_config(name: str) -> dict[str, Any]:
    """The Hugging Face config fields of a catalogue model. Raises InputError with the nearest names for an unknown one."""
    if name not in _entries():
        nearest = difflib.get_close_matches(name.lower(), _entries(), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else f"it has {', '.join(_entries())}"
        raise InputError(f"{name!r} is not in the model catalogue; {hint}")
    config: dict[str, Any] = copy.deepcopy(_entries()[name]["config"])
    return config


def model_tokenizer(name: str) -> str | None:
    """The hub repository whose tokenizer a catalogue model was made for; None for a shape that has none of its own."""
    tokenizer = _entries()[name].get("tokenizer")
    return str(tokenizer) if tokenizer else None
