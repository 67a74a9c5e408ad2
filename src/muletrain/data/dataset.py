"""A prepared data set on disk: memory-mapped token shards, a document index and the manifest that says what happened.

Layout of the folder, all integers little-endian:

    dataset.json                       the Manifest; written last, so a folder without it is not a data set
    <split>-00012.tokens               token ids of the 13th work unit, uint16 or uint32
    <split>.offsets                    int64 [documents + 1]: where each document starts in the split's tokens, then the end
    <split>.bytes                      int64 [documents]: UTF-8 bytes of each document's text
    rows/                              row tables, built once for each length and packing (pack.py)

A document never straddles two shards. Rejected: one file a split (a terabyte copied once more to publish it) and Arrow (a row
is an integer slice; nothing of a table is needed).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from muletrain.spec.errors import InputError
from muletrain.spec.value import Value

MANIFEST = "dataset.json"
SCHEMA_VERSION = 3
REJECTED_LISTED = 1000
SplitName = Literal["train", "validation"]
SPLITS: tuple[SplitName, ...] = ("train", "validation")
IntArray = np.ndarray[Any, np.dtype[np.int64]]
TokenArray = np.ndarray[Any, np.dtype[Any]]


class Rejected(Value):
    """A row that was left out."""

    where: str
    """file:line, and :offset where one byte is at fault."""
    why: str


class Shard(Value):
    """One file of token ids."""

    name: str
    tokens: int


class SplitCounts(Value):
    """What a split holds."""

    documents: int
    tokens: int
    """With bos and eos."""
    text_bytes: int
    """UTF-8 bytes of the documents' text."""
    shards: tuple[Shard, ...]


class Manifest(Value):
    """What was read, what became of it, and by which rules."""

    schema_version: int = SCHEMA_VERSION
    fingerprint: str
    """Of the files' content and names, the tokenizer and the options: equal fingerprint, equal data set."""
    content: str
    """The same without the files' names: equal content, equal documents in the same order, wherever the files lie."""
    tokenizer: str
    tokenizer_fingerprint: str
    text_key: str
    validation_fraction: float
    token_bytes: Literal[2, 4]
    vocabulary: int
    vocabulary_used: int
    """Different ids that occur in the train split."""
    largest_id: int
    """Of all documents: what the model's embedding must hold."""
    eos: int
    pad: int
    """What padding is filled with: the tokenizer's pad token, or eos where there is none or it is above largest_id (added
    behind the vocabulary, so that a model may have no row for it). Never trained on, whichever it is."""
    document_limit_bytes: int
    files: int
    binary_files: int
    """Skipped: not text."""
    rows: int
    """Rows of JSON files and whole text files."""
    rejected: int
    rejected_rows: tuple[Rejected, ...]
    """The first REJECTED_LISTED."""
    empty: int
    """Rows with nothing but white space."""
    too_short: int
    """Documents with no pair of tokens to learn from."""
    cut: int
    """Cuts made in documents over document_limit_bytes."""
    train: SplitCounts
    validation: SplitCounts

    def split(self, name: SplitName) -> SplitCounts:
        """One split's counts."""
        return self.train if name == "train" else self.validation


@dataclass(frozen=True)
class Prepared:
    """A checked data set folder. Small; pickles to worker processes."""

    folder: Path
    manifest: Manifest

    def documents(self, split: SplitName) -> Documents:
        """Maps a split into memory."""
        return Documents(self, split)


class Documents:
    """A split's tokens and index, memory-mapped: nothing is read until it is asked for."""

    def __init__(self, prepared: Prepared, split: SplitName) -> None:
        self.counts = prepared.manifest.split(split)
        self._dtype = np.dtype(f"<u{prepared.manifest.token_bytes}")
        self._paths = [prepared.folder / shard.name for shard in self.counts.shards]
        self._ends = np.cumsum([shard.tokens for shard in self.counts.shards], dtype=np.int64)
        self._shards: dict[int, TokenArray] = {}
        self._folder, self._split = prepared.folder, split

    @cached_property
    def offsets(self) -> IntArray:
        """int64 [documents + 1]: document d is tokens offsets[d] to offsets[d + 1]."""
        return np.memmap(self._folder / f"{self._split}.offsets", dtype="<i8", mode="r")

    @cached_property
    def text_bytes(self) -> IntArray:
        """int64 [documents]."""
        if not self.counts.documents:
            return np.zeros(0, dtype=np.int64)
        return np.memmap(self._folder / f"{self._split}.bytes", dtype="<i8", mode="r")

    def tokens(self, start: int, count: int) -> TokenArray:
        """`count` ids from a position in the split; they must lie within one document."""
        shard = int(np.searchsorted(self._ends, start, side="right"))
        if shard not in self._shards:
            self._shards[shard] = np.memmap(self._paths[shard], dtype=self._dtype, mode="r")
        at = start - (int(self._ends[shard - 1]) if shard else 0)
        return self._shards[shard][at : at + count]

    def document(self, number: int) -> TokenArray:
        """All ids of a document, bos and eos included."""
        start, end = self.offsets[number : number + 2]
        return self.tokens(int(start), int(end - start))


def require_vocabulary(prepared: Prepared, vocabulary: int, model: str) -> None:
    """Raises InputError where `model`, with an embedding of `vocabulary` rows, cannot take the data set's ids."""
    manifest = prepared.manifest
    if manifest.largest_id >= vocabulary:
        raise InputError(
            f"data.tokenizer: {manifest.tokenizer} gives ids up to {manifest.largest_id}, and {model} has {vocabulary} words; "
            f"use the model's own tokenizer, or with random weights model.overrides.vocab_size={manifest.vocabulary} or more"
        )


def is_prepared(folder: Path) -> bool:
    """Whether a folder is a published data set."""
    return (folder / MANIFEST).is_file()


def open_prepared(folder: Path) -> Prepared:
    """Opens and checks a data set. Raises InputError for what is not one, or is damaged."""
    if not is_prepared(folder):
        raise InputError(f"{folder}: not a prepared data set (no {MANIFEST}); make one with mule data prepare")
    try:
        manifest = Manifest.load(folder / MANIFEST)
    except (ValidationError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{folder / MANIFEST}: written by another version, or damaged ({reason}); prepare it again") from None
    if manifest.schema_version != SCHEMA_VERSION:
        raise InputError(
            f"{folder / MANIFEST}: schema_version {manifest.schema_version} is not {SCHEMA_VERSION}; prepare it again"
        )
    sizes: dict[str, int] = {}
    for name in SPLITS:
        counts = manifest.split(name)
        sizes |= {shard.name: shard.tokens * manifest.token_bytes for shard in counts.shards}
        sizes |= {f"{name}.offsets": 8 * (counts.documents + 1), f"{name}.bytes": 8 * counts.documents}
    for file, size in sizes.items():
        path = folder / file
        if not path.is_file() or path.stat().st_size != size:
            raise InputError(f"{path}: missing or cut short ({size:,} bytes expected); copy or prepare it again")
    return Prepared(folder, manifest)
