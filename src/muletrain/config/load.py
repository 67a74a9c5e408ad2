"""Recipe file + command line arguments -> RunConfig, with everything that is wrong reported at once, by key and place.

The order: find leaves (document.py), let the key's types read them, then the rules between keys. A key that is wrong is set
aside so that the rest is still checked.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from muletrain.config.document import Document, read_argument, read_document
from muletrain.config.keys import WORDS_ELSEWHERE, Leaf, Path, dotted, table
from muletrain.config.rules import broken_rules
from muletrain.spec.errors import InputError
from muletrain.spec.recipe import RunConfig

_STAND_IN = "?"
"""In place of a required text that is missing, so that the rest can be checked; never leaves this module."""


def load_recipe(path: FilePath, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a recipe and `dotted.key=value` arguments, which win. Raises InputError with all problems found."""
    document = read_document(_read_text(path), str(path))
    for argument in overrides:
        document.update(read_argument(argument))
    return _typed(document, str(path))


def _read_text(path: FilePath) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such recipe") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise InputError(f"{path}:{line}: not UTF-8 text (byte 0x{error.object[error.start]:02x}); save it as UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: cannot read the recipe: {error.strerror}") from None


def _typed(document: Document, file: str) -> RunConfig:
    values = {path: value for path, value in document.values.items() if value is not None or _in_free(path)}
    problems = list(document.problems)
    unsound: set[str] = set()
    config: RunConfig | None = None
    unreadable = bool(problems) and not document.values
    try:
        config = RunConfig.model_validate(_nested(values))
    except ValidationError as error:
        wrong = {_leaf_path(detail["loc"]): detail for detail in error.errors(include_url=False)}
        for path, detail in wrong.items():
            if not (unreadable and detail["type"] == "missing"):
                problems.append(_message(table()[1][path], detail, document.places.get(path), file))
        unsound = {dotted(path) for path in wrong}
        sound = {path: value for path, value in values.items() if path not in wrong}
        stand_ins = {path: _STAND_IN for path in wrong if table()[1][path].required}
        config = RunConfig.model_validate(_nested(sound | stand_ins))
    if not unreadable:
        for key, message in broken_rules(config, unsound):
            place = document.places.get(tuple(key.split(".")), file)
            problems.append(f"{place}: {message}")
    if problems:
        raise InputError(*problems)
    return config


def _in_free(path: Path) -> bool:
    """Below a free mapping null is a value of its own."""
    return path not in table()[1]


def _nested(leaves: dict[Path, Any]) -> dict[str, Any]:
    """{("a", "b"): 1} -> {"a": {"b": 1}}. Sections without default exist even if empty, so that their own keys are named."""
    tree: dict[str, Any] = {}
    for path in (path for path in table()[1] if table()[1][path].required):
        _inner(tree, path)
    for path, value in leaves.items():
        _inner(tree, path)[path[-1]] = value
    return tree


def _inner(tree: dict[str, Any], path: Path) -> dict[str, Any]:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    return tree


def _leaf_path(location: tuple[int | str, ...]) -> Path:
    """The key that an error of pydantic is about: its location without list indices and union branches."""
    leaves = table()[1]
    return next(path for end in range(1, len(location) + 1) if (path := tuple(str(p) for p in location[:end])) in leaves)


def _message(leaf: Leaf, detail: Any, place: str | None, file: str) -> str:
    key, found = dotted(leaf.path), detail["input"]
    if detail["type"] == "missing":
        return f"{file}: {key} is missing: {leaf.documentation}"
    if isinstance(found, list | dict) or detail["type"] in ("string_type", "tuple_type"):
        wanted = "one value or a list of values" if detail["type"] == "tuple_type" else "one value"
        kind = {list: "a list", dict: "a mapping", type(None): "nothing"}.get(type(found), repr(found))
        reason = "an empty list; give at least one" if found == [] else f"{kind}, where {wanted} is wanted"
    elif leaf.choices and detail["type"] in ("literal_error", "string_type"):
        word = str(found).lower()
        nearest = difflib.get_close_matches(WORDS_ELSEWHERE.get(word, word), leaf.choices, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        reason = f"{found!r} is not one of {', '.join(leaf.choices)}{hint}"
    elif detail["type"] == "value_error":
        reason = str(detail["ctx"]["error"])
    elif detail["type"] == "string_too_short":
        reason = "is empty"
    else:
        limits = {"greater_than_equal": "at least {ge}", "greater_than": "more than {gt}", "less_than_equal": "at most {le}"}
        limit = (limits | {"less_than": "less than {lt}"})[detail["type"]].format(**detail["ctx"])
        reason = f"{found} is out of range; it must be {limit}"
    return f"{place or file}: {key}: {reason}"
