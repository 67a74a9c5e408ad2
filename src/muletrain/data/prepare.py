"""Source text to a data set: found, hashed, tokenized in parallel, published whole, and found again next time.

The work happens in a folder beside the target, named by the fingerprint of everything that decides the result: a killed run is
taken up where it stopped, and nothing stale can be taken up. A file lock lets one process work while others wait for it.
The manifest is written last and the folder renamed, so a reader sees a whole data set or none.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from muletrain.data import read
from muletrain.data.dataset import (
    MANIFEST,
    REJECTED_LISTED,
    SCHEMA_VERSION,
    SPLITS,
    Manifest,
    Prepared,
    Rejected,
    Shard,
    SplitCounts,
    is_prepared,
    open_prepared,
)
from muletrain.data.sources import SourceFile, examine, find_files
from muletrain.data.tokenizer import TextTokenizer, load_tokenizer
from muletrain.data.units import PARTIAL, Unit, UnitReport, group_pieces, publish_text, tokenize_unit
from muletrain.data.workers import run_jobs
from muletrain.spec.errors import InputError
from muletrain.spec.plan import DataPlan

Progress = Callable[[str, int, int], None]
"""Called with (stage, bytes done, bytes in all), from any thread; stages are "hash", "wait" and "tokenize"."""
_COUNTED = ("rows", "rejected", "empty", "too_short", "cut")


def _silent(stage: str, done: int, total: int) -> None:
    """Shows nothing."""


def prepare(data: DataPlan, *, out: Path | None = None, progress: Progress = _silent) -> Prepared:
    """Makes, or finds, the data set of a plan. Call before any process group exists: it may take long.

    `data.source` may be a folder that `prepare` wrote. The result lies in `out`, else in data.cache_dir under its fingerprint.
    Uses data.processes processes, and memory that does not grow with the corpus (but 16 bytes a document of a work unit).
    Raises InputError for sources that cannot be used, for rejected rows under bad_rows: stop, and where nothing is left to
    train on; WorkerFailedError if a process is killed.
    """
    tokenizer = load_tokenizer(data.tokenizer)
    prepared = _given(data, tokenizer) if any(is_prepared(Path(source).expanduser()) for source in data.source) else None
    if prepared is None:
        prepared = _made(data, tokenizer, out, progress)
    elif out is not None:
        raise InputError(f"data.source: {data.source[0]!r} is a prepared data set already; use it as it is")
    _check(prepared, data)
    return prepared


def _given(data: DataPlan, tokenizer: TextTokenizer) -> Prepared:
    if len(data.source) != 1:
        raise InputError("data.source: a prepared data set stands alone; prepare its sources together with the others instead")
    prepared = open_prepared(Path(data.source[0]).expanduser())
    if prepared.manifest.tokenizer_fingerprint != tokenizer.fingerprint:
        raise InputError(
            f"data.source: {data.source[0]!r} was prepared with another tokenizer ({prepared.manifest.tokenizer}) than "
            f"data.tokenizer ({data.tokenizer}); prepare it again with this one"
        )
    return prepared


def _made(data: DataPlan, tokenizer: TextTokenizer, out: Path | None, progress: Progress) -> Prepared:
    files = _hashed(data, progress)
    fingerprint = _fingerprint(files, tokenizer, data)
    target = out if out is not None else Path(data.cache_dir).expanduser() / "datasets" / fingerprint
    with _writing(target, "data.cache_dir" if out is None else "--out"), _locked(target, progress):
        if is_prepared(target):
            prepared = open_prepared(target)
            if prepared.manifest.fingerprint == fingerprint:
                return prepared
            raise InputError(f"{target}: holds a data set of other content or options; remove it or choose another folder")
        if target.exists() and any(target.iterdir()):
            raise InputError(f"{target}: is not empty and not a data set; choose another folder")
        work = target.with_name(f".{target.name}.{fingerprint[:16]}.partial")
        work.mkdir(exist_ok=True)
        units = [
            Unit(number, pieces, work, data.tokenizer, tokenizer.fingerprint, data.text_key, data.validation_fraction)
            for number, pieces in enumerate(group_pieces(files))
        ]
        _tokenize(units, data.processes, progress)
        manifest = _assemble(units, files, fingerprint, tokenizer, data)
        publish_text(work / MANIFEST, manifest.to_json())
        for left in work.glob(f"*{PARTIAL}"):  # of a killed run
            left.unlink()
        os.rename(work, target)  # replaces an empty folder
        for name in [unit.report.name for unit in units] + [unit.arrays.name for unit in units]:
            (target / name).unlink()
    return open_prepared(target)


def _hashed(data: DataPlan, progress: Progress) -> list[SourceFile]:
    paths = find_files(data.source)
    total, done, lock = sum(os.path.getsize(path) for path in paths), 0, Lock()

    def advance(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            progress("hash", done, total)

    return examine(paths, data.text_key, data.processes, advance)


def _fingerprint(files: Sequence[SourceFile], tokenizer: TextTokenizer, data: DataPlan, *, named: bool = True) -> str:
    """Names are part of a data set's because its messages show them, and not of its content's; times are of neither."""
    digest = hashlib.blake2b(digest_size=16)
    options = [SCHEMA_VERSION, read.DOCUMENT_LIMIT_BYTES, read.ROW_LIMIT_BYTES, tokenizer.fingerprint]
    digest.update(json.dumps([*options, data.text_key, data.validation_fraction]).encode())
    for file in files:
        digest.update(json.dumps([file.path if named else "", file.digest, file.form]).encode())
    return digest.hexdigest()


@contextmanager
def _writing(target: Path, key: str) -> Iterator[None]:
    """Makes the folder that `target` is to lie in. What the system refuses there is an InputError naming the key."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise InputError(
            f"{key}: the data set cannot be written to {target.parent}: {error.strerror or error}{where}; choose a folder that "
            "you may write to, with space left; what is done is kept"
        ) from None


@contextmanager
def _locked(target: Path, progress: Progress) -> Iterator[None]:
    """Holds the target's lock; the system frees it when the holder dies."""
    with open(target.with_name(f".{target.name}.lock"), "wb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("wait", 0, 0)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _tokenize(units: Sequence[Unit], processes: int, progress: Progress) -> None:
    left = [unit for unit in units if not unit.report.is_file()]
    sizes = {unit.number: unit.size for unit in left}
    total = sum(unit.size for unit in units)
    done = total - sum(sizes.values())
    progress("tokenize", done, total)
    for number in run_jobs(tokenize_unit, left, processes):
        done += sizes[number]
        progress("tokenize", done, total)


def _assemble(
    units: Sequence[Unit], files: Sequence[SourceFile], fingerprint: str, tokenizer: TextTokenizer, data: DataPlan
) -> Manifest:
    """Joins the units' indexes and reports; their token files are the shards."""
    folder = units[0].folder
    counts = {split: _join_index(units, folder, split) for split in SPLITS}
    used = np.zeros(tokenizer.vocabulary, dtype=np.bool_)
    reports = []
    for unit in units:
        reports.append(UnitReport.load(unit.report))
        with np.load(unit.arrays) as arrays:
            used |= np.unpackbits(arrays["used"], count=tokenizer.vocabulary).astype(np.bool_)
    largest = max(report.largest_id for report in reports)
    return Manifest(
        fingerprint=fingerprint,
        content=_fingerprint(files, tokenizer, data, named=False),
        tokenizer=data.tokenizer,
        tokenizer_fingerprint=tokenizer.fingerprint,
        text_key=data.text_key,
        validation_fraction=data.validation_fraction,
        token_bytes=2 if tokenizer.dtype.itemsize == 2 else 4,
        vocabulary=tokenizer.vocabulary,
        vocabulary_used=int(used.sum()),
        largest_id=largest,
        eos=tokenizer.eos,
        pad=tokenizer.pad if tokenizer.pad <= largest else tokenizer.eos,
        document_limit_bytes=read.DOCUMENT_LIMIT_BYTES,
        files=len(files),
        binary_files=sum(file.form == "binary" for file in files),
        rejected_rows=_rejected(units, reports),
        train=counts["train"],
        validation=counts["validation"],
        **{
            name: sum(getattr(report, name) for report in reports) for name in ("rows", "rejected", "empty", "too_short", "cut")
        },
    )


def _join_index(units: Sequence[Unit], folder: Path, split: Any) -> SplitCounts:
    shards, documents, tokens, text_bytes = [], 0, 0, 0
    with open(folder / f"{split}.offsets", "wb") as offsets, open(folder / f"{split}.bytes", "wb") as sizes:
        offsets.write(np.zeros(1, dtype="<i8").tobytes())
        for unit in units:
            with np.load(unit.arrays) as arrays:
                lengths, unit_bytes = arrays[split]
            if not len(lengths):
                continue
            ends = tokens + np.cumsum(lengths)
            offsets.write(ends.astype("<i8").tobytes())
            sizes.write(unit_bytes.astype("<i8").tobytes())
            shards.append(Shard(name=unit.shard(split).name, tokens=int(lengths.sum())))
            documents, tokens, text_bytes = documents + len(lengths), int(ends[-1]), text_bytes + int(unit_bytes.sum())
    return SplitCounts(documents=documents, tokens=tokens, text_bytes=text_bytes, shards=tuple(shards))


def _rejected(units: Sequence[Unit], reports: Sequence[UnitReport]) -> tuple[Rejected, ...]:
    listed: list[Rejected] = []
    path, before = "", 0
    for unit, report in zip(units, reports, strict=True):
        bases = []
        for piece, lines in zip(unit.pieces, report.lines, strict=True):
            path, before = piece.file.path, before if piece.file.path == path else 0
            bases.append(before)
            before += lines
        for row in report.rejected_rows:
            where = f"{unit.pieces[row.piece].file.path}:{bases[row.piece] + row.line}{row.place}"
            listed.append(Rejected(where=where, why=row.why))
    return tuple(listed[:REJECTED_LISTED])


def _check(prepared: Prepared, data: DataPlan) -> None:
    manifest = prepared.manifest
    problems = [f"{row.where}: {row.why}" for row in manifest.rejected_rows]
    if manifest.rejected > len(problems):
        problems.append(f"and {manifest.rejected - len(problems):,} more rows")
    if manifest.rejected and data.bad_rows == "stop":
        fix = f"{manifest.rejected:,} rows cannot be read; mend them, or leave them out with data.bad_rows=skip"
        raise InputError(*problems, fix)
    if not manifest.train.documents:
        if manifest.validation.documents:
            raise InputError(
                f"data.validation_fraction: all {manifest.validation.documents} documents fell to validation and none is left "
                "to train on; set it to 0, or give more documents"
            )
        left = f"{manifest.rows} rows: {manifest.rejected} rejected, {manifest.empty} empty, {manifest.too_short} too short"
        binary = ""
        if manifest.binary_files:
            binary = f"; {manifest.binary_files} hold no text but bytes: write tables such as Parquet as JSONL, unpack archives"
        files = f"{manifest.files} file{'s' if manifest.files > 1 else ''}"
        raise InputError(*problems[:20], f"data.source: no document to train on in {files} ({left}){binary}")
