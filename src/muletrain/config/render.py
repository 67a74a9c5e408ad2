"""A RunConfig as a recipe again: complete, with defaults, and read back to an equal value by load_recipe."""

from __future__ import annotations

import yaml

from muletrain.config.document import read_word
from muletrain.spec.recipe import RunConfig


class _Dumper(yaml.SafeDumper):
    """Quotes each text that a reader could take for something else."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    quoted = not isinstance(read_word(text), str)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if quoted else None)


_Dumper.add_representer(str, _text)


def dump_recipe(config: RunConfig) -> str:
    """YAML text; absent values are written as null."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
