"""The recipe's JSON schema, with documentation: for editors (yaml-language-server) and for reading.

Numbers and switches are also accepted as text ("64k", "24GiB", on), so the schema says so; what the text must look like is in
spec/units.py.
"""

from __future__ import annotations

from typing import Any

from muletrain.spec.recipe import RunConfig

_ALSO_TEXT = ("integer", "number", "boolean")


def recipe_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a recipe."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}
    _accept_text(schema)
    data_source = schema["$defs"]["DataSection"]["properties"]["source"]
    description = data_source.pop("description")
    schema["$defs"]["DataSection"]["properties"]["source"] = {
        "description": description,
        "anyOf": [{"type": "string", "minLength": 1}, data_source],
    }
    return schema


def _accept_text(node: Any) -> None:
    """Widens each number and switch, in place, to take text too."""
    if isinstance(node, list):
        for item in node:
            _accept_text(item)
    elif isinstance(node, dict):
        if node.get("type") in _ALSO_TEXT:
            node["type"] = [node["type"], "string"]
        for value in node.values():
            _accept_text(value)
