"""Output that outlives its reader: `mule train recipe.yaml | head` must not end a run.

Everything else may end when nobody reads it, as programs do; a run has its event log, and nobody wants it dead for a closed
window. The reader's end is noticed at the first write that fails; from then on the descriptor leads to nowhere.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Enduring:
    """A text stream whose writes never raise BrokenPipeError; everything else is the stream's own."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes, or loses the text when nobody is there to read it."""
        try:
            self._stream.write(text)
        except BrokenPipeError:
            self._lead_nowhere()
        return len(text)

    def flush(self) -> None:
        """Flushes likewise."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._lead_nowhere()

    def _lead_nowhere(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        self._stream.flush()  # what was held back goes the same way


@contextmanager
def enduring_output() -> Iterator[None]:
    """While active, in this process and those it forks, a reader that goes away is no error."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Enduring(sys.stdout), _Enduring(sys.stderr)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = streams
