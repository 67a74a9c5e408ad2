"""`mule data`: train a tokenizer, prepare a data set, and look at one. No verb here imports torch."""

from __future__ import annotations

import json as json_format
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from muletrain.data.dataset import Prepared
    from muletrain.data.prepare import Progress
    from muletrain.spec.plan import DataPlan

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Prepare text for training, and look at it."
)
_HEARTBEAT_S = 10.0
_TEXT_KEY, _VALIDATION_FRACTION, _SEQUENCE_LENGTH = "text", 0.01, 2048


class BadRows(StrEnum):
    """What to do with a row that cannot be read."""

    skip = "skip"
    stop = "stop"


class Packing(StrEnum):
    """How rows are made of documents."""

    best_fit = "best_fit"
    concat = "concat"
    none = "none"


Sources = Annotated[list[str], typer.Argument(metavar="SOURCE", help="Text files, folders, globs, JSONL or JSON files.")]
TextKey = Annotated[str, typer.Option(help="The field of a JSON row that holds the text.")]
Fraction = Annotated[float, typer.Option(min=0.0, max=0.5, help="Share of documents held out, by a hash of their content.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


@app.command()
def prepare(
    source: Sources,
    tokenizer: Annotated[str, typer.Option(help="A tokenizer folder, a tokenizer.json or a hub name.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="The folder to write; without it, the cache.", show_default=False)] = None,
    text_key: TextKey = _TEXT_KEY,
    validation_fraction: Fraction = _VALIDATION_FRACTION,
    bad_rows: Annotated[BadRows, typer.Option(help="Skip and count rows that cannot be read, or stop.")] = BadRows.skip,
    processes: Annotated[int, typer.Option(min=0, help="Tokenizing processes; 0: one a core.")] = 0,
    json: Json = False,
) -> None:
    """Tokenize text into a data set that `data.source` can name."""
    plan = _plan(source, tokenizer, text_key, validation_fraction, bad_rows, processes)
    prepared = _prepared(plan, out)
    from muletrain.data.report import report, report_lines

    if json:
        _say(json_format.dumps(report(prepared, plan.sequence_length, plan.packing, None, 0)))
        return
    _say("\n".join([*report_lines(prepared), f"data set: {prepared.folder}"]))


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH_OR_RECIPE", help="A data set, a recipe, or a source of text.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to a recipe.")] = None,
    sequence_length: Annotated[
        str, typer.Option(help="Row length to pack for, e.g. 4k; without it, the recipe's or 2048.", show_default=False)
    ] = "",
    packing: Annotated[
        Packing | None, typer.Option(help="How to pack; without it, the recipe's or best_fit.", show_default=False)
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="For a source of text, and to show a data set's documents.")] = "",
    text_key: TextKey = _TEXT_KEY,
    validation_fraction: Fraction = _VALIDATION_FRACTION,
    documents: Annotated[int, typer.Option(min=0, help="First documents to show.")] = 2,
    rejected: Annotated[int, typer.Option(min=0, help="Rejected rows to list.")] = 20,
    json: Json = False,
) -> None:
    """Say what a data set holds, what was left out and why, and how full packed rows are."""
    from muletrain.data.dataset import is_prepared, open_prepared
    from muletrain.data.report import first_documents, report, report_lines
    from muletrain.data.tokenizer import load_tokenizer
    from muletrain.spec.errors import InputError

    length, packed = _SEQUENCE_LENGTH, packing
    if is_prepared(Path(path)):
        prepared = open_prepared(Path(path))
    else:
        plan = _inspected_plan(path, overrides or [], tokenizer, text_key, validation_fraction)
        prepared = _prepared(plan, None)
        length, packed = plan.sequence_length, packing or Packing(plan.packing)
    length, packed = _length(sequence_length) or length, packed or Packing.best_fit
    try:
        encoder = load_tokenizer(tokenizer or prepared.manifest.tokenizer) if documents else None
    except InputError as error:
        typer.echo(f"documents are not shown: {error}", err=True)
        encoder = None
    if encoder and encoder.fingerprint != prepared.manifest.tokenizer_fingerprint:
        raise InputError(f"--tokenizer: {encoder.source} is not the one the data set was made with; name that one")
    if json:
        _say(json_format.dumps(report(prepared, length, packed.value, encoder, documents)))
        return
    _say("\n".join(report_lines(prepared, length, packed.value, rejected)))
    for number, text in enumerate(first_documents(prepared, encoder, documents) if encoder else ()):
        _say(f"--- document {number}\n{text}")


@app.command()
def tokenizer(
    source: Sources,
    out: Annotated[Path, typer.Option(help="The folder to write.", show_default=False)],
    vocab_size: Annotated[int, typer.Option(min=258, help="Number of tokens, <s> and </s> included.")] = 4096,
    text_key: TextKey = _TEXT_KEY,
) -> None:
    """Train a byte-level BPE tokenizer on text, as a Hugging Face folder."""
    from muletrain.data.read import Bad, documents
    from muletrain.data.sources import examine, find_files
    from muletrain.data.tokenizer import publish_tokenizer

    files = examine(find_files(source), text_key, len(os.sched_getaffinity(0)), lambda _: None)
    left_out = 0

    def texts() -> Iterator[str]:
        nonlocal left_out
        for item in documents(files, text_key):
            if isinstance(item, Bad):
                left_out += 1
            else:
                yield item.text

    trained = publish_tokenizer(texts(), vocab_size, out)
    if left_out:
        typer.echo(f"{left_out} rows could not be read and were left out; mule data inspect names them", err=True)
    _say(f"tokenizer: {out}, {trained.vocabulary:,} tokens")


def _plan(
    source: list[str], tokenizer: str, text_key: str, validation_fraction: float, bad_rows: BadRows, processes: int
) -> DataPlan:
    from muletrain.config.environment import cache_dir
    from muletrain.spec.plan import DataPlan

    return DataPlan(
        source=tuple(source),
        tokenizer=tokenizer,
        text_key=text_key,
        sequence_length=_SEQUENCE_LENGTH,
        packing="best_fit",
        validation_fraction=validation_fraction,
        bad_rows=bad_rows.value,
        cache_dir=str(cache_dir()),
        processes=processes or len(os.sched_getaffinity(0)),
    )


def _inspected_plan(path: str, overrides: list[str], tokenizer: str, text_key: str, validation_fraction: float) -> DataPlan:
    """A recipe's data, or a source's. Rejected rows are shown, never a reason to stop."""
    from muletrain.spec.errors import InputError

    if not path.endswith((".yaml", ".yml")):
        if overrides:
            raise InputError(f"{overrides[0]}: changes go with a recipe, and {path!r} is none (its name does not end in .yaml)")
        if not tokenizer:
            raise InputError(f"{path!r} is no data set and no recipe; to look at text, name a tokenizer with --tokenizer")
        return _plan([path], tokenizer, text_key, validation_fraction, BadRows.skip, 0)
    from muletrain.cli.box import box_for
    from muletrain.config.load import load_recipe
    from muletrain.planner.resolve import resolve

    request = load_recipe(Path(path), overrides)
    return resolve(request, box_for(request)).data.model_copy(update={"bad_rows": "skip"})


def _length(text: str) -> int:
    from muletrain.spec.errors import InputError
    from muletrain.spec.units import parse_length

    try:
        length = parse_length(text) if text else 0
    except ValueError as error:
        raise InputError(f"--sequence-length: {error}") from None
    if text and length < 1:
        raise InputError("--sequence-length: a packed row holds at least 1 token")
    return length


def _prepared(plan: DataPlan, out: Path | None) -> Prepared:
    from muletrain.data.prepare import prepare as prepare_data

    with shown_progress() as progress:
        return prepare_data(plan, out=out, progress=progress)


@contextmanager
def shown_progress(*, quiet: bool = False) -> Iterator[Progress]:
    """Progress of preparing on stderr: a bar on a terminal, elsewhere a line every ten seconds; nothing if `quiet`."""
    if quiet:
        yield lambda *_: None
        return
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress as Bar

        with Bar(console=Console(stderr=True), transient=True) as bar:
            tasks = {stage: bar.add_task(title, total=None, visible=False) for stage, title in _STAGES.items()}
            yield lambda stage, done, total: bar.update(tasks[stage], completed=done, total=total or None, visible=True)
        return
    last = time.monotonic()

    def line(stage: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _HEARTBEAT_S or stage == "wait":
            last = time.monotonic()
            typer.echo(f"{_STAGES[stage]}{f': {done / total:.0%}' if total else ''}", err=True)

    yield line


_STAGES = {"hash": "reading files", "wait": "waiting for another process that prepares the same data", "tokenize": "tokenizing"}


def _say(text: str) -> None:
    """Prints what the console's encoding can show, the rest escaped: a document may hold any character."""
    encoding = sys.stdout.encoding or "utf-8"
    typer.echo(text.encode(encoding, "backslashreplace").decode(encoding))
