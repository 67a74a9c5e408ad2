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
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C one takes a tenth of the time
    entries: dict[str, dict[str, Any]] = {}
    for file in sorted(files("muletrain.catalog").joinpath("data/models").iterdir(), key=lambda file: file.name):
        entries |= yaml.load(file.read_text(encoding="utf-8"), loader)
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


def model_source(name: str) -> str:
    """Where the numbers of a catalogue model are from."""
    return str(_entries()[name]["source"])


def catalogue_name(text: str) -> str | None:
    """The catalogue model that a hub-style name means: its repository, also as a base, chat or instruct version of it.

    They differ in weights, not in shape. None where no entry is meant; nothing is guessed from parts of a name.
    """
    if text in _entries():
        return text
    owner, _, wanted = text.rpartition("/")
    for name, entry in _entries().items():
        repository = str(entry.get("tokenizer") or "")
        if not owner or not repository.startswith(owner + "/"):
            continue
        if _plain(wanted) in (_plain(repository.rpartition("/")[2]), _plain(name)):
            return name
    return None


def _plain(name: str) -> str:
    plain = name.lower()
    for end in ("-hf", "-base", "-chat", "-instruct", "-it"):
        plain = plain.removesuffix(end)
    return plain


def model_tokenizer(name: str) -> str | None:
    """The hub repository whose tokenizer a catalogue model was made for; None for a shape that has none of its own."""
    tokenizer = _entries()[name].get("tokenizer")
    return str(tokenizer) if tokenizer else None
