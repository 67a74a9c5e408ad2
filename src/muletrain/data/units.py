"""Work units: the corpus in parts that are tokenized alone, in any process, and kept when a run is killed.

A unit's output depends on its bytes only, so units are the same for any number of processes, and its shards are the data set's
shards: publishing moves nothing. The report (unit-00012.json) is written last and marks the unit as done.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import numpy as np

from muletrain.data.dataset import REJECTED_LISTED, SPLITS, SplitName
from muletrain.data.read import TO_THE_END, Bad, Document, Piece, PieceReader
from muletrain.data.sources import SourceFile
from muletrain.data.tokenizer import TextTokenizer, load_tokenizer
from muletrain.spec.errors import InputError
from muletrain.spec.value import Value

UNIT_BYTES = 4 << 20
MOST_UNITS = 1024
PARTIAL = ".partial"
_PACKED_RATIO = 4
_FLUSH_TOKENS = 1 << 18


@dataclass(frozen=True)
class Unit:
    """Pieces that one process tokenizes in one go, and where to."""

    number: int
    pieces: tuple[Piece, ...]
    folder: Path
    tokenizer: str
    tokenizer_fingerprint: str
    text_key: str
    validation_fraction: float

    @property
    def report(self) -> Path:
        """The file whose presence says that the unit is done."""
        return self.folder / f"unit-{self.number:05d}.json"

    @property
    def arrays(self) -> Path:
        """Lengths a document and the ids used."""
        return self.folder / f"unit-{self.number:05d}.npz"

    def shard(self, split: SplitName) -> Path:
        """The unit's token file of a split."""
        return self.folder / f"{split}-{self.number:05d}.tokens"

    @property
    def size(self) -> int:
        """Bytes to read, for progress."""
        return sum(min(piece.end, piece.file.size) - piece.start for piece in self.pieces)


class BadRow(Value):
    """A rejected row; the line counts from the start of the unit's piece."""

    piece: int
    line: int
    place: str
    why: str


class UnitReport(Value):
    """What a unit met."""

    lines: tuple[int, ...]
    """Lines a piece, so that later pieces of the same file know their first line's number."""
    rows: int
    rejected: int
    rejected_rows: tuple[BadRow, ...]
    empty: int
    too_short: int
    cut: int
    largest_id: int


def pieces_of(files: Sequence[SourceFile], piece_bytes: int) -> Iterator[Piece]:
    """Files in ranges of about piece_bytes: only plain JSON lines can be split."""
    for file in files:
        if file.form == "lines" and not file.packed:
            for start in range(0, max(file.size, 1), piece_bytes):
                yield Piece(file, start, min(start + piece_bytes, file.size))
        else:
            yield Piece(file, 0, TO_THE_END if file.packed else file.size)


def group_pieces(files: Sequence[SourceFile]) -> list[tuple[Piece, ...]]:
    """The pieces of each unit, in order; small files share one. Depends on the files alone, not on processes."""
    total = sum(_work(file.size, file) for file in files)
    target = max(UNIT_BYTES, -(-total // MOST_UNITS))
    groups: list[tuple[Piece, ...]] = []
    group: list[Piece] = []
    held = 0
    for piece in pieces_of(files, target):
        work = _work(min(piece.end, piece.file.size) - piece.start, piece.file)
        if group and held + work > target:
            groups.append(tuple(group))
            group, held = [], 0
        group.append(piece)
        held += work
    return [*groups, tuple(group)] if group else groups


def _work(size: int, file: SourceFile) -> int:
    return size * _PACKED_RATIO if file.packed else size


@lru_cache(maxsize=1)
def _tokenizer(source: str) -> TextTokenizer:
    # In a spawned process nothing forks any more; the caller's own process may fork its workers after preparing.
    return replace(load_tokenizer(source), batch_call=parent_process() is not None)


def tokenize_unit(unit: Unit) -> int:
    """Does one unit and returns its number. What a killed attempt left is not used."""
    tokenizer = _tokenizer(unit.tokenizer)
    if tokenizer.fingerprint != unit.tokenizer_fingerprint:
        _tokenizer.cache_clear()
        raise InputError(f"{unit.tokenizer}: the tokenizer changed while data was being prepared; start again")
    writers = {split: _SplitWriter(unit.shard(split), tokenizer.dtype) for split in SPLITS}
    used = np.zeros(tokenizer.vocabulary, dtype=np.bool_)
    bad: list[BadRow] = []
    lines, rows, rejected, empty, too_short, cut, largest = [], 0, 0, 0, 0, 0, 0
    for number, piece in enumerate(unit.pieces):
        reader = PieceReader(piece, unit.text_key)
        for item in reader:
            if isinstance(item, Bad):
                rejected += 1
                if len(bad) < REJECTED_LISTED:
                    bad.append(BadRow(piece=number, line=item.line, place=item.place, why=item.why))
                continue
            cut += item.cut
            if not item.text.strip():
                empty += 1
                continue
            ids = tokenizer.encode(item.text)
            if len(ids) < 2:
                too_short += 1
                continue
            largest = max(largest, int(ids.max()))
            split = _split(item, unit.validation_fraction)
            writers[split].add(ids, len(item.text_utf8))
            if split == "train":
                used[ids] = True
        rows += reader.rows
        lines.append(reader.lines)
    arrays = {split: writer.finish() for split, writer in writers.items()}
    _write_arrays(unit.arrays, arrays | {"used": np.packbits(used)})
    counts = {"rows": rows, "rejected": rejected, "empty": empty, "too_short": too_short, "cut": cut, "largest_id": largest}
    publish_text(unit.report, UnitReport(lines=tuple(lines), rejected_rows=tuple(bad), **counts).to_json())
    return unit.number


def _split(document: Document, validation_fraction: float) -> SplitName:
    """By the content alone, so that order, units and workers cannot move a document to the other side."""
    digest = hashlib.blake2b(document.text_utf8, digest_size=8).digest()
    return "validation" if int.from_bytes(digest, "little") < validation_fraction * 2**64 else "train"


class _SplitWriter:
    """Appends documents to a shard in blocks; holds 16 bytes a document."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._path, self._partial, self._dtype = path, partial(path), dtype
        self._lengths: list[int] = []
        self._bytes: list[int] = []
        self._held: list[np.ndarray[Any, np.dtype[Any]]] = []
        self._held_tokens = 0
        self._partial.unlink(missing_ok=True)

    def add(self, ids: np.ndarray[Any, np.dtype[Any]], text_bytes: int) -> None:
        self._lengths.append(len(ids))
        self._bytes.append(text_bytes)
        self._held.append(ids)
        self._held_tokens += len(ids)
        if self._held_tokens >= _FLUSH_TOKENS:
            self._flush()

    def _flush(self) -> None:
        if self._held:
            with open(self._partial, "ab") as stream:
                stream.write(np.concatenate(self._held).astype(self._dtype, copy=False).tobytes())
            self._held, self._held_tokens = [], 0

    def finish(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Completes the shard (absent where there is no document); int64 [2, documents]: tokens and text bytes."""
        self._flush()
        if self._lengths:
            os.replace(self._partial, self._path)
        return np.array([self._lengths, self._bytes], dtype=np.int64)


def _write_arrays(path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    with open(partial(path), "wb") as stream:
        np.savez(stream, allow_pickle=False, **arrays)
    os.replace(partial(path), path)


def partial(path: Path) -> Path:
    """Where this process writes a file before it gets its name.

    A process that outlives a killed parent by a moment may still be at the same unit: then each renames the same content.
    """
    return path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")


def publish_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    partial(path).write_text(text, encoding="utf-8")
    os.replace(partial(path), path)
