"""Signs of life: each worker writes what it is about to do where the launcher looks, so that a hang is noticed and named.

Steps have a limit, after the first: it compiles and warms up. Whatever has no usual length (loading, compiling, evaluating,
saving) has none. Rejected: a thread that beats every second, which goes on beating while the training thread hangs.
"""

from __future__ import annotations

import os
from pathlib import Path

from muletrain.spec.events import RunRecord
from muletrain.spec.place import WorkerPlace
from muletrain.spec.sign import Sign, record_file, sign_file

_PATIENCE = 10
"""Times the longest step so far: slow steps are slow, not hung."""


class Signs:
    """One worker's. Without a launcher that looks (torchrun, tests) nothing is written."""

    def __init__(self, place: WorkerPlace | None = None, hang_after_s: float = 0.0) -> None:
        """`hang_after_s`: parallel.hang_after_s; 0: no limit."""
        self._board = Path(place.board) if place and place.board else None
        self._file = os.open(sign_file(self._board, place.rank), os.O_WRONLY | os.O_CREAT) if place and self._board else None
        self._hang_after_s, self._longest_s, self._number = hang_after_s, 0.0, 0

    def show(self, doing: str, *, step: bool = False) -> None:
        """The worker is about to do this: "saving step 12". `step`: as part of a step, which has a limit."""
        self._number += 1
        if self._file is None:
            return
        known = step and self._hang_after_s > 0 and self._longest_s > 0
        limit = max(self._hang_after_s, _PATIENCE * self._longest_s) if known else 0.0
        text = Sign(number=self._number, doing=doing, limit_s=limit).to_json().encode()
        os.pwrite(self._file, text.ljust(512), 0)  # over the last one, in one write

    def took(self, seconds: float) -> None:
        """A step took so long."""
        self._longest_s = max(self._longest_s, seconds)

    def leave(self, record: RunRecord) -> None:
        """Should this worker die now, this is the record."""
        if self._board is not None:
            temporary = record_file(self._board).with_suffix(".partial")
            temporary.write_text(record.to_json(), encoding="utf-8")
            temporary.replace(record_file(self._board))

    def recorded(self) -> None:
        """The record is written: nothing is left to the launcher."""
        if self._board is not None:
            record_file(self._board).unlink(missing_ok=True)
