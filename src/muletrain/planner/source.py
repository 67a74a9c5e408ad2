"""model.source -> ModelPlan: a catalogue name, a Hugging Face folder (or its config.json), or a hub name that is in the cache.

Only config.json is read. Nothing is downloaded here: planning works without a network and never starts a transfer of gigabytes;
`mule train` has fetched what is missing (catalog/hub.py) before it plans. A hub name becomes the folder of its snapshot.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from muletrain.catalog import hub
from muletrain.catalog.families import model_shape, with_overrides
from muletrain.catalog.models import catalogue_name, model_config, model_names
from muletrain.spec.errors import InputError
from muletrain.spec.model_shape import ModelShape
from muletrain.spec.plan import ModelPlan
from muletrain.spec.recipe import ModelSection


def read_model(section: ModelSection) -> tuple[ModelPlan, str | None]:
    """The model, and why its weights are what they are where the recipe left that open. Raises InputError naming the fix."""
    if section.source in model_names():
        return _planned(section, section.source, model_config(section.source), has_weights=False, where="a catalogue shape")
    path = Path(section.source).expanduser()
    if path.name == "config.json" and path.is_file():
        path = path.parent
    if path.is_dir():
        has_weights = any(path.glob("*.safetensors"))
        return _planned(section, str(path), _folder_config(path), has_weights, where="a folder")
    if _looks_like_path(section.source):
        raise InputError(f"model.source: there is no folder {section.source}")
    if section.source.count("/") != 1:
        model_config(section.source)  # raises, naming the nearest catalogue names
    path = _snapshot(section.source)
    return _planned(section, str(path), _folder_config(path), has_weights=True, where="a hub name", name=section.source)


def read_shape(source: str) -> ModelShape:
    """The shape of a catalogue name, a hub name that means one, a folder, a config.json, or a hub name in the cache.

    Only numbers are read: any config of a known family will do. Raises InputError naming the nearest names.
    """
    known = catalogue_name(source)
    if known is not None:
        return model_shape(model_config(known), known)
    file = Path(source).expanduser()
    if file.suffix == ".json" and file.is_file():
        return model_shape(_json_object(file), file.parent.name or file.name)
    return read_model(ModelSection(source=source))[0].shape


def _looks_like_path(source: str) -> bool:
    return source.startswith((".", "/", "~")) or source.endswith(("/", ".json"))


def _planned(
    section: ModelSection, source: str, config: dict[str, Any], has_weights: bool, where: str, name: str = ""
) -> tuple[ModelPlan, str | None]:
    if section.weights == "pretrained" and not has_weights:
        fix = "give a folder with *.safetensors or a hub name" if where == "a catalogue shape" else "no *.safetensors in it"
        raise InputError(f"model.weights: pretrained, but model.source {source} is {where} without weights; {fix}")
    name = name or source
    weights: Literal["pretrained", "random"] = "pretrained" if has_weights else "random"
    reason = f"model.weights = {weights}: {name} is {where} {'with' if has_weights else 'without'} weights"
    if section.weights != "auto":
        weights, reason = section.weights, ""
    config = with_overrides(config, section.overrides, name)
    return ModelPlan(source=source, config=config, weights=weights, shape=model_shape(config, name)), reason or None


def _folder_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"model.source: {folder} has no config.json; give a Hugging Face model folder")
    return _json_object(file)


def _json_object(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"{file}: a model's config is a JSON object, and this is {type(config).__name__}")
    return config


def _snapshot(name: str) -> Path:
    folder = hub.cached(name, "model.source")
    if folder is None:
        raise InputError(
            f"model.source: {name} is not a folder, and no hub model of that name has been downloaded; "
            f"run: hf download {name}, or give a folder (mule train downloads it by itself)"
        )
    return folder
