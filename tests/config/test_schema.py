"""The JSON schema accepts what recipes may hold and documents every key."""

from __future__ import annotations

from muletrain.config.keys import table
from muletrain.config.schema import recipe_schema


def test_schema_has_every_key_with_its_meaning() -> None:
    schema = recipe_schema()
    for path, leaf in table()[1].items():
        node = schema
        for name in path:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
            node = node["properties"][name]
        if path != ("run_dir",):
            assert " ".join(node["description"].split()) == leaf.documentation, path


def test_schema_takes_numbers_as_text_and_sources_alone_or_listed() -> None:
    definitions = recipe_schema()["$defs"]
    assert definitions["TrainSection"]["properties"]["tokens_per_step"]["type"] == ["integer", "string"]
    assert definitions["OptimizerSection"]["properties"]["learning_rate"]["type"] == ["number", "string"]
    source = definitions["DataSection"]["properties"]["source"]
    assert [option["type"] for option in source["anyOf"]] == ["string", "array"]
    assert "source" in definitions["DataSection"]["required"]
    assert definitions["ModelSection"]["additionalProperties"] is False
