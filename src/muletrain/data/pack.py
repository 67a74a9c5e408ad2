"""Packing: which pieces of which documents share a row.

A document of L tokens gives L - 1 pairs (input, target). It is cut into segments of at most S pairs, the next starting where
the last ended, so every token after a document's first is a target exactly once an epoch. A row holds segments of up to S pairs
together; how they are put together is the packing:

    best_fit   whole segments, best-fit-decreasing (Ding et al. 2024, "Fewer Truncations Improve Language Modeling");
               segments of equal length come in a seeded order, so that rows mix documents
    concat     the stream of all pairs, documents in a seeded order, cut every S pairs; a cut piece is a segment of its own
    none       a segment a row

Best fit places all segments of one length at once (numpy), so a million take well under a second. Rejected: packing on the fly
in a buffer (its rows depend on the reading order, and the number of steps is a guess).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from muletrain.data.dataset import Prepared, SplitName
from muletrain.data.order import KeyedOrder

Packing = Literal["best_fit", "concat", "none"]
IntArray = np.ndarray[Any, np.dtype[np.int64]]
_VERSION = 1
_ARRAYS = ("row_start", "segment_start", "segment_length")


@dataclass(frozen=True)
class RowTable:
    """Rows of segments. Row i is segments row_start[i] to row_start[i + 1]; a segment of n pairs at token t has inputs
    tokens[t : t + n] and targets tokens[t + 1 : t + n + 1]."""

    sequence_length: int
    row_start: IntArray
    """int64 [rows + 1]."""
    segment_start: IntArray
    """int64 [segments]: the first token, within the split."""
    segment_length: IntArray
    """int64 [segments]: pairs."""

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.row_start) - 1

    @property
    def pairs(self) -> int:
        """Trained tokens an epoch."""
        return int(self.segment_length.sum())

    @property
    def fill(self) -> float:
        """Share of the rows' positions that are trained, 0 to 1; 0 without rows."""
        return self.pairs / (self.rows * self.sequence_length) if self.rows else 0.0

    def row_pairs(self) -> IntArray:
        """int64 [rows]: pairs in each row."""
        return np.add.reduceat(self.segment_length, self.row_start[:-1]) if self.rows else np.zeros(0, dtype=np.int64)


def build_rows(offsets: IntArray, sequence_length: int, packing: Packing, seed: int) -> RowTable:
    """The rows of documents at `offsets` (int64 [documents + 1]). Every pair of every document is in one row, once."""
    starts = np.asarray(offsets[:-1], dtype=np.int64)
    pairs = np.diff(offsets).astype(np.int64) - 1
    if packing == "concat":
        order = KeyedOrder(len(starts), "concat", seed)(np.arange(len(starts)))
        return _concat(starts[order], pairs[order], sequence_length)
    segment_start, segment_length = _cut(starts, pairs, sequence_length)
    if packing == "none":
        return RowTable(sequence_length, np.arange(len(segment_start) + 1), segment_start, segment_length)
    order, row = best_fit(segment_length, sequence_length, seed)
    by_row = np.argsort(row, kind="stable")
    order, row = order[by_row], row[by_row]
    row_start = np.searchsorted(row, np.arange(int(row[-1]) + 2 if len(row) else 1))
    return RowTable(sequence_length, row_start, segment_start[order], segment_length[order])


def _cut(starts: IntArray, pairs: IntArray, limit: int) -> tuple[IntArray, IntArray]:
    """Segments (start, pairs) of documents, each at most `limit` pairs, in document order."""
    pieces = -(-pairs // limit)
    which = np.repeat(np.arange(len(pairs)), pieces)
    number = np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return starts[which] + number * limit, np.minimum(limit, pairs[which] - number * limit)


def _concat(starts: IntArray, pairs: IntArray, limit: int) -> RowTable:
    document_end = np.cumsum(pairs)
    total = int(document_end[-1]) if len(pairs) else 0
    row_ends = np.arange(limit, total + limit, limit).clip(max=total)
    cuts = np.union1d(document_end, row_ends)
    begins = np.concatenate([[0], cuts[:-1]]).astype(np.int64)[: len(cuts)]
    document = np.searchsorted(document_end, begins, side="right")
    segment_start = starts[document] + begins - (document_end - pairs)[document]
    row_start = np.searchsorted(begins, np.arange(0, total + limit, limit)[: len(row_ends) + 1])
    return RowTable(limit, row_start, segment_start, cuts - begins)


def best_fit(lengths: IntArray, capacity: int, seed: int) -> tuple[IntArray, IntArray]:
    """Best-fit-decreasing of items into rows of `capacity`: (item [n], its row [n]), rows numbered without gaps.

    Longest first; each goes to the open row with the least room that takes it. All items of a length are placed together: a row
    with room r takes r // length of them, as it would one by one, since it stays the tightest until it is too full.
    """
    shuffled = KeyedOrder(len(lengths), "best_fit", seed)(np.arange(len(lengths)))
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    row_of = np.empty(len(lengths), dtype=np.int64)
    open_rows = _OpenRows()
    values, counts = np.unique(lengths, return_counts=True)
    at, rows = 0, 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        left = count
        while left:
            room = open_rows.tightest(length)
            if room is None:
                room = capacity
                wanted = -(-left // (room // length))
                taken = np.arange(rows, rows + wanted)
                rows += wanted
            else:
                taken = open_rows.take(room, -(-left // (room // length)))
            each = room // length
            placed = min(left, len(taken) * each)
            row_of[at : at + placed] = np.repeat(taken, each)[:placed]
            full, rest = divmod(placed, each)
            open_rows.put(room - each * length, taken[:full])
            if rest:
                open_rows.put(room - rest * length, taken[full:])
            at, left = at + placed, left - placed
    return order, row_of


class _OpenRows:
    """Rows by the room they have left; finds the tightest fit by a bit set of the rooms in use."""

    def __init__(self) -> None:
        self._rooms: dict[int, list[IntArray]] = {}
        self._in_use = 0

    def tightest(self, length: int) -> int | None:
        fitting = self._in_use >> length
        return length + (fitting & -fitting).bit_length() - 1 if fitting else None

    def put(self, room: int, rows: IntArray) -> None:
        if room and len(rows):
            self._rooms.setdefault(room, []).append(rows)
            self._in_use |= 1 << room

    def take(self, room: int, most: int) -> IntArray:
        """Removes up to `most` rows of a room."""
        taken: list[IntArray] = []
        held = self._rooms[room]
        while held and most:
            rows = held.pop()
            if len(rows) > most:
                held.append(rows[most:])
                rows = rows[:most]
            taken.append(rows)
            most -= len(rows)
        if not held:
            del self._rooms[room]
            self._in_use ^= 1 << room
        return np.concatenate(taken)


def row_table(prepared: Prepared, split: SplitName, sequence_length: int, packing: Packing, seed: int) -> RowTable:
    """The rows of a split: memory-mapped from the data set's folder, built there first if need be (in memory if read-only)."""
    folder = prepared.folder / "rows" / f"{split}-{packing}-{sequence_length}-{seed}-v{_VERSION}"
    if not folder.is_dir():
        table = build_rows(prepared.documents(split).offsets, sequence_length, packing, seed)
        try:
            _save(table, folder)
        except OSError:  # a read-only or full disk: the table in memory serves as well
            return table
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
    return RowTable(sequence_length, **arrays)


def _save(table: RowTable, folder: Path) -> None:
    """Publishes by rename: of several processes one wins, and all wrote the same."""
    folder.parent.mkdir(exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".rows-", dir=folder.parent))
    try:
        for name in _ARRAYS:
            np.save(temporary / f"{name}.npy", getattr(table, name))
        os.rename(temporary, folder)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        if not folder.is_dir():
            raise
