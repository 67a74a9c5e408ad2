"""The base of every value: frozen, closed (an unknown field is an error), JSON round trip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict


class Value(BaseModel):
    """An immutable record. Equal content is an equal value."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)

    def to_json(self) -> str:
        """Stable, indented JSON that `from_json` reads back to an equal value."""
        return json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote. Raises pydantic.ValidationError for anything else."""
        return cls.model_validate_json(text)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a file that `to_json` filled."""
        return cls.from_json(path.read_text(encoding="utf-8"))
