"""The JSON Lines sink: one event a line, appended in one write and kept by the system at once, so a kill loses at most a line.

A run never ends because of its log: a line that cannot be written is dropped with one notice. Rejected: a logging service as a
dependency; whatever is wanted can be fed from this file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from muletrain.spec.value import Value


class EventSink:
    """Appends events to a file. A half line that a kill left behind is closed first, so that it spoils no other."""

    def __init__(self, path: Path, notice: Callable[[str], None]) -> None:
        self._path, self._notice, self._failed = path, notice, False
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            size = os.fstat(self._descriptor).st_size
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                os.write(self._descriptor, b"\n")
        except OSError as error:
            self._fail(error)

    def write(self, event: Value) -> None:
        """Adds one event. Fields that are None or no number are absent, never 0 or null."""
        line = json.dumps(_finite(event.model_dump(mode="json", exclude_none=True)), ensure_ascii=False, allow_nan=False)
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, line.encode() + b"\n")
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if not self._failed:
            self._notice(f"{self._path} cannot be written ({error.strerror}); training goes on without its log")
        self._failed = True

    def close(self) -> None:
        """Ends the sink."""
        if self._descriptor is not None:
            os.close(self._descriptor)


def _finite(content: dict[str, Any]) -> dict[str, Any]:
    kept = {key: _finite(value) if isinstance(value, dict) else value for key, value in content.items()}
    return {key: value for key, value in kept.items() if not (isinstance(value, float) and not math.isfinite(value))}


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events of a file in order; a line that is no object (cut off by a kill) is left out."""
    events = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):  # splitlines would cut at U+2028
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events
