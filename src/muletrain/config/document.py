"""A YAML document or command line argument as leaves: dotted key -> (text or list of texts, where it was written).

Every scalar stays text: what `1e-5`, `010`, `on` or `12:30` means is the business of the key's type (spec/units.py), not of
YAML 1.1, which reads them as a string, eight, a boolean and 750. Only `null`, `~` and nothing at all mean absent. Inside a free
mapping (model.overrides), where no type is known, plain words are read as JSON would, and quoted ones are text.
Rejected: yaml.safe_load with a repaired resolver, because it gives no line numbers and lets the last of two equal keys win.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from muletrain.config.keys import Path, dotted, table, unknown_key

_NULL = {"", "~", "null", "Null", "NULL"}
_INTEGER = re.compile(r"[-+]?\d[\d_]*")
_FLOAT = re.compile(r"[-+]?(\d[\d_]*)?\.?\d+([eE][-+]?\d+)?|[-+]?\d[\d_]*\.([eE][-+]?\d+)?")
_TEXT_TAG = "tag:yaml.org,2002:str"
_DEEPEST = 16


@dataclass
class Document:
    """What was found: values and places by leaf path, and what is wrong. An absent value (null) is kept as None."""

    values: dict[Path, Any] = field(default_factory=dict)
    places: dict[Path, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def update(self, other: Document) -> None:
        """Takes the other's values over this one's."""
        self.values |= other.values
        self.places |= other.places
        self.problems += other.problems


def read_word(text: str) -> Any:
    """A plain word where no type is known: null, true, false, whole number, real number, else the text itself."""
    if text in _NULL:
        return None
    if text in ("true", "false"):
        return text == "true"
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text


class _Reader:
    """Walks YAML nodes along the recipe's keys. `place` turns a node into "recipe.yaml:12" or the argument's text."""

    def __init__(self, place: Callable[[yaml.Node], str]) -> None:
        self.place = place
        self.document = Document()

    def problem(self, node: yaml.Node, message: str) -> None:
        self.document.problems.append(f"{self.place(node)}: {message}")

    def section(self, node: yaml.Node, path: Path) -> None:
        """A section's mapping; nothing or null means all defaults."""
        if _is_null(node):
            return
        if not isinstance(node, yaml.MappingNode):
            self.problem(node, f"{dotted(path) or 'a recipe'} is a section: write its keys below it, indented")
            return
        for name, key_node, value in self.pairs(node, path):
            self.key(key_node, value, (*path, name))

    def key(self, key_node: yaml.Node, node: yaml.Node, path: Path) -> None:
        """One key of any level and its value."""
        sections, leaves = table()
        if path in sections:
            self.section(node, path)
        elif path[:-1] in leaves and leaves[path[:-1]].free:
            self.document.values[path] = self.untyped(node, path)
            self.document.places[path] = self.place(key_node)
        elif path not in leaves:
            self.problem(key_node, unknown_key(path))
        elif leaves[path].free:
            self.free(node, path)
        else:
            self.document.values[path] = self.typed(node, path)
            self.document.places[path] = self.place(key_node)

    def free(self, node: yaml.Node, path: Path) -> None:
        """A mapping of the user's own names: each is a leaf, so that command line arguments can set one of them."""
        if _is_null(node):
            return
        if not isinstance(node, yaml.MappingNode):
            self.problem(node, f"{dotted(path)} is a mapping: write name: value pairs below it, indented")
            return
        for name, key_node, value in self.pairs(node, path):
            self.key(key_node, value, (*path, name))

    def pairs(self, node: yaml.MappingNode, path: Path) -> list[tuple[str, yaml.Node, yaml.Node]]:
        """(name, key node, value node); a name given twice or not a word is a problem."""
        seen: dict[str, yaml.Node] = {}
        pairs: list[tuple[str, yaml.Node, yaml.Node]] = []
        for key_node, value in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.problem(key_node, f"a key{f' of {dotted(path)}' if path else ''} must be a word")
            elif key_node.value in seen:
                first = self.place(seen[key_node.value])
                self.problem(key_node, f"{dotted((*path, key_node.value))} is given twice, first at {first}; keep one")
            else:
                seen[key_node.value] = key_node
                pairs.append((key_node.value, key_node, value))
        return pairs

    def typed(self, node: yaml.Node, path: Path) -> Any:
        """Text, list or mapping of text, for the key's type to judge."""
        if isinstance(node, yaml.ScalarNode):
            self.check_tag(node, path)
            return None if _is_null(node) else node.value
        if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
            return [self.typed(item, path) for item in node.value]
        return self.untyped(node, path)

    def untyped(self, node: yaml.Node, path: Path, depth: int = 0) -> Any:
        """A value where no type is known."""
        if depth > _DEEPEST:
            self.problem(node, f"{dotted(path)} is nested too deeply, or contains itself")
            return None
        if isinstance(node, yaml.ScalarNode):
            self.check_tag(node, path)
            return read_word(node.value) if node.style is None else node.value
        if isinstance(node, yaml.SequenceNode):
            return [self.untyped(item, path, depth + 1) for item in node.value]
        assert isinstance(node, yaml.MappingNode)  # YAML has no fourth kind
        return {name: self.untyped(value, (*path, name), depth + 1) for name, _, value in self.pairs(node, path)}

    def check_tag(self, node: yaml.ScalarNode, path: Path) -> None:
        if node.tag not in (_TEXT_TAG, "!"):  # "!" is what quotes leave
            self.problem(node, f"{dotted(path)}: YAML tags ({node.tag}) are not used in recipes; write the plain value")


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in _NULL


def read_document(text: str, file: str) -> Document:
    """A recipe's text. Problems are in the result; YAML that cannot be parsed is one of them."""
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        starts = [text[place.index : place.index + 1] for place in (error.context_mark, error.problem_mark) if place]
        special = any(start and start in "*&%@`" for start in starts)
        hint = "; quote a text that starts with * & % @ or `" if special else ""
        line = f":{mark.line + 1}" if mark else ""
        return Document(problems=[f"{file}{line}: not valid YAML: {error.problem or error.context}{hint}"])
    except yaml.YAMLError as error:
        return Document(problems=[f"{file}: not valid YAML: {' '.join(str(error).split())}"])
    except RecursionError:
        return Document(problems=[f"{file}: nested too deeply to be a recipe"])
    if root is None:
        return Document(problems=[f"{file}: the recipe is empty; it needs at least run_dir, model.source and data.source"])
    if not isinstance(root, yaml.MappingNode):
        line = f"{file}:{root.start_mark.line + 1}"
        return Document(problems=[f"{line}: a recipe is a mapping of keys (model:, data:, train:, …) to values"])
    reader = _Reader(lambda node: f"{file}:{node.start_mark.line + 1}")
    reader.section(root, ())
    return reader.document


def read_argument(argument: str) -> Document:
    """One `dotted.key=value`. The value is text as it stands, unless it opens as a YAML list, mapping or quoted text."""
    name, equals, text = argument.partition("=")
    where = f"argument {argument!r}"
    if not equals or not name.strip():
        return Document(problems=[f"{where}: write key=value, e.g. train.optimizer.learning_rate=1e-5"])
    node: yaml.Node = yaml.ScalarNode(_TEXT_TAG, text)
    if text.lstrip()[:1] in tuple("[{\"'"):
        try:
            parsed = yaml.compose(text, Loader=yaml.BaseLoader)
        except yaml.YAMLError as error:
            reason = getattr(error, "problem", None) or "unreadable"
            return Document(problems=[f"{where}: the value is not valid YAML: {reason}"])
        node = parsed if parsed is not None else node
    reader = _Reader(lambda _: where)
    path = tuple(name.strip().split("."))
    if path in table()[0] and not isinstance(node, yaml.MappingNode):
        reader.problem(node, f"{dotted(path)} is a section; set one of its keys, e.g. {_example(path)}")
    else:
        reader.key(node, node, path)
    return reader.document


def _example(section: Path) -> str:
    return next(dotted(path) for path in table()[1] if path[: len(section)] == section) + "=…"
