"""What became of the data, for a person and for a program: the report that cannot be missed.

A row is what a file holds, a line or a record; a packed row is what the model is given, documents side by side.
Everything that was left out is counted here and named by file:line; a count of nothing is not shown, so what is shown matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from muletrain.data.dataset import SPLITS, Prepared
from muletrain.data.pack import Packing, RowTable, row_table
from muletrain.data.tokenizer import TextTokenizer
from muletrain.spec.units import format_count

REPORT_SCHEMA_VERSION = 2
_SHORT_LIST = 5
_EXCERPT_TOKENS = 256
_ENOUGH_FOR_VALIDATION = 20


def report_lines(
    prepared: Prepared, sequence_length: int = 0, packing: Packing = "best_fit", rejected: int = _SHORT_LIST
) -> list[str]:
    """The report in a few lines, with the first `rejected` rejected rows. With a sequence length: how full packed rows are."""
    manifest = prepared.manifest
    files = f"{manifest.files:,} file{'s' if manifest.files != 1 else ''}"
    lines = [f"data: {manifest.rows:,} rows read from {files}", *_left_out(prepared, rejected)]
    for name in SPLITS:
        counts = manifest.split(name)
        tokens, size = format_count(counts.tokens), format_count(counts.text_bytes)
        lines.append(f"  {name}: {counts.documents:,} documents, {tokens} tokens, {size}B of text")
    lines += [f"  note: {note}" for note in notes(prepared)]
    share = manifest.vocabulary_used / manifest.vocabulary
    lines.append(f"  vocabulary: {manifest.vocabulary_used:,} of {manifest.vocabulary:,} ids occur ({share:.0%})")
    if sequence_length:
        table = row_table(prepared, "train", sequence_length, packing, 0)
        rows = f"{table.rows:,} packed rows, {table.pairs:,} trained tokens"
        lines.append(f"  packing {packing} at {sequence_length:,}: {rows}, {table.fill:.1%} full")
    return lines


def _left_out(prepared: Prepared, listed: int) -> Iterator[str]:
    manifest = prepared.manifest
    if manifest.rejected:
        yield f"  rejected: {manifest.rejected:,} rows could not be used"
        yield from (f"    {row.where}: {row.why}" for row in manifest.rejected_rows[:listed])
        more = manifest.rejected - min(listed, len(manifest.rejected_rows))
        if more:
            yield f"    and {more:,} more (mule data inspect {prepared.folder} --rejected 1000)"
    if manifest.binary_files:
        yield f"  skipped: {manifest.binary_files:,} binary files"
    if manifest.empty:
        yield f"  empty: {manifest.empty:,} rows hold only white space"
    if manifest.too_short:
        yield f"  too short: {manifest.too_short:,} documents have no pair of tokens to learn from"
    if manifest.cut:
        limit = manifest.document_limit_bytes
        yield f"  cut: {manifest.cut:,} cuts in documents over {limit:,} bytes; each part is a document of its own"


def notes(prepared: Prepared) -> list[str]:
    """What the counts alone do not say."""
    manifest = prepared.manifest
    documents = manifest.train.documents + manifest.validation.documents
    if manifest.validation.documents or not manifest.validation_fraction:
        return []
    what = f"no document of {documents:,} fell to validation at data.validation_fraction = {manifest.validation_fraction:g}"
    remedy = "raise it" if documents >= _ENOUGH_FOR_VALIDATION else "give more documents"
    return [f"{what}, so evaluations have nothing to measure; {remedy}"]


def report(
    prepared: Prepared, sequence_length: int, packing: Packing, tokenizer: TextTokenizer | None, documents: int
) -> dict[str, Any]:
    """The whole report as plain JSON values. `documents` decoded ones are shown if there is a tokenizer."""
    manifest = prepared.manifest
    named = ("fingerprint", "tokenizer", "files", "binary_files", "rows", "rejected", "empty", "too_short", "cut", "vocabulary")
    dumped = manifest.model_dump(mode="json")
    return {
        "schema_version": REPORT_SCHEMA_VERSION,
        "folder": str(prepared.folder),
        **{name: dumped[name] for name in named},
        "vocabulary_used": manifest.vocabulary_used,
        "document_limit_bytes": manifest.document_limit_bytes,
        "rejected_rows": dumped["rejected_rows"],
        "notes": notes(prepared),
        **{name: {key: dumped[name][key] for key in ("documents", "tokens", "text_bytes")} for name in SPLITS},
        "packing": _packing(row_table(prepared, "train", sequence_length, packing, 0), packing),
        "first_documents": list(first_documents(prepared, tokenizer, documents)) if tokenizer else [],
    }


def _packing(table: RowTable, packing: Packing) -> dict[str, Any]:
    sizes = {"packed_rows": table.rows, "trained_tokens": table.pairs, "fill": round(table.fill, 6)}
    return {"kind": packing, "sequence_length": table.sequence_length, **sizes}


def first_documents(prepared: Prepared, tokenizer: TextTokenizer, count: int) -> Iterator[str]:
    """The first training documents as the model will see them, special tokens shown; long ones by their beginning."""
    split = prepared.documents("train")
    for number in range(min(count, split.counts.documents)):
        ids = split.document(number)
        more = f" … {len(ids) - _EXCERPT_TOKENS:,} more tokens" if len(ids) > _EXCERPT_TOKENS else ""
        yield tokenizer.decode(ids[:_EXCERPT_TOKENS]) + more
