"""The scaling table: the same work on several worker counts, side by side, from what each run wrote into its folder.

The same recipe, so the same global batch: more workers must do the same work sooner, or they are of no use (strong scaling).
What was not measured is said to be so, never shown as 0. Speed is the median over steps with its spread; the first steps, in
which caches fill and clocks settle, do not count. Rejected: a mean (one slow step moves it), and a benchmark loop of its own
(it would measure something else than training).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from muletrain.spec.errors import EXIT_DONE, EXIT_STOPPED, InputError, StoppedError, WorkerFailedError
from muletrain.spec.events import RunRecord
from muletrain.spec.machine import Machine
from muletrain.spec.plan import Plan
from muletrain.spec.units import format_bytes
from muletrain.spec.value import Value

DROPPED = 2
"""First steps that do not count."""
NOT_MEASURED = "not measured"
V = TypeVar("V", bound=Value)


class ScalingRow(Value):
    """One worker count."""

    workers: int
    strategy: str
    device: str
    tokens_per_step: int
    steps: int
    """Steps that count."""
    tokens_per_s: float
    """Median over those steps, trained tokens over all workers."""
    tokens_per_s_low: float
    tokens_per_s_high: float
    peak_memory_bytes: int
    communication_exposed: float | None = None
    communication_overlapped: float | None = None


class ScalingTable(Value):
    """What `scaling.json` holds."""

    schema_version: int = 1
    model: str
    hardware: str
    notes: tuple[str, ...]
    rows: tuple[ScalingRow, ...]


def measure(start: Callable[[int, Path], int], workers: Sequence[int], folder: Path) -> list[Path]:
    """Runs start(workers, run folder), an exit code, for each count, one after the other; the run folders.

    Raises StoppedError if a signal stopped one, WorkerFailedError for one that did not end well.
    """
    folders = []
    for count in workers:
        run = folder / f"workers-{count}"
        code = start(count, run)
        if code == EXIT_STOPPED:
            raise StoppedError(f"a signal stopped the run on {count} workers, so there is no table")
        if code != EXIT_DONE:
            raise WorkerFailedError(f"the run on {count} workers ended with exit code {code}; what it printed is above")
        folders.append(run)
    return folders


def table_of(folders: Sequence[Path], drop: int = DROPPED) -> ScalingTable:
    """The table of finished runs of the same model. Raises InputError for a folder without a measured session."""
    plans = [_load(Plan, folder / "plan.json") for folder in folders]
    names = sorted({plan.model.shape.name for plan in plans})
    if len(names) > 1:
        raise InputError(f"the runs are of different models ({', '.join(names)}); a table compares one model with itself")
    rows = sorted((_row(folder, plan, drop) for folder, plan in zip(folders, plans, strict=True)), key=lambda row: row.workers)
    machine = _load(Machine, folders[0] / "machine.json")
    return ScalingTable(model=names[0], hardware=hardware_line(machine), notes=tuple(_notes(rows, machine)), rows=tuple(rows))


def _load(kind: type[V], path: Path) -> V:
    try:
        return kind.load(path)
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file; give a run folder whose training has ended") from None
    except (ValueError, OSError) as error:  # pydantic's errors are ValueErrors
        raise InputError(f"{path}: damaged, or of another version ({str(error).splitlines()[0]})") from None


def _row(folder: Path, plan: Plan, drop: int) -> ScalingRow:
    record = _load(RunRecord, folder / "record.json")
    speeds = [event["tokens_per_s"] for event in _last_session(folder / "events.jsonl") if not event["skipped"]]
    if not speeds:
        raise InputError(f"{folder}: its last session has no step event; log.every may be larger than its steps")
    counted = speeds[min(drop, len(speeds) - 1) :]
    return ScalingRow(
        workers=record.workers,
        strategy=record.strategy,
        device=plan.parallel.device,
        tokens_per_step=plan.tokens_per_step,
        steps=len(counted),
        tokens_per_s=statistics.median(counted),
        tokens_per_s_low=min(counted),
        tokens_per_s_high=max(counted),
        peak_memory_bytes=record.peak_memory_bytes,
        communication_exposed=record.communication_exposed,
        communication_overlapped=record.communication_overlapped,
    )


def _last_session(path: Path) -> list[dict[str, float]]:
    """The step events after the last start or resume; a line cut off by a kill is left out."""
    steps: list[dict[str, float]] = []
    if not path.is_file():
        return steps
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue
        if event["kind"] in ("start", "resume"):
            steps = []
        elif event["kind"] == "step":
            steps.append(event)
    return steps


def hardware_line(machine: Machine) -> str:
    """The box in one line."""
    host = f"{machine.cores} cores of {machine.cpu}, {format_bytes(machine.host_memory_bytes)} of host memory"
    if not machine.gpus:
        return f"{host}, no GPU"
    names = sorted({gpu.name for gpu in machine.gpus})
    cards = " and ".join(f"{sum(gpu.name == name for gpu in machine.gpus)} x {name}" for name in names)
    return f"{cards} ({machine.gpus[0].driver}), {host}"


def _notes(rows: Sequence[ScalingRow], machine: Machine) -> list[str]:
    notes = []
    if any(row.device == "cpu" and row.workers > 1 for row in rows):
        notes.append(
            f"No speed-up is to be expected: all workers share the same {machine.cores} CPU cores, which one worker alone "
            "keeps busy already. More workers do the same work on the same cores and talk to each other besides; "
            "the table shows what that costs."
        )
    if any(row.workers > 1 and row.communication_overlapped is None for row in rows):
        notes.append(
            "Overlapped communication is not measured: on a CPU (gloo) it cannot be seen; on GPUs it comes from a profile of "
            "a few steps, which mule bench asks for and a plain run does not."
        )
    base = rows[0]
    if any(row.tokens_per_s / base.tokens_per_s > 1.1 * row.workers / base.workers for row in rows):
        notes.append(
            "An efficiency well over 100 % is no gain: something else slowed the first row down. Measure again on a quiet "
            "machine."
        )
    if len({row.tokens_per_step for row in rows}) > 1:
        notes.append("The runs differ in tokens a step, so this is not the same work: compare tokens/s with care.")
    return notes


_HEAD = (
    "workers",
    "tokens/s",
    "spread",
    "peak memory a worker",
    "communication exposed",
    "overlapped",
    "speed-up",
    "efficiency",
)


def markdown(table: ScalingTable) -> str:
    """The table for a person: aligned in a terminal, and a table where Markdown is read."""
    base = table.rows[0]
    lines = [_HEAD]
    for row in table.rows:
        speed_up = row.tokens_per_s / base.tokens_per_s
        lines.append(
            (
                str(row.workers),
                f"{row.tokens_per_s:,.0f}",
                f"{row.tokens_per_s_low:,.0f} to {row.tokens_per_s_high:,.0f} (n={row.steps})",
                format_bytes(row.peak_memory_bytes),
                _share(row.communication_exposed, row.workers),
                _share(row.communication_overlapped, row.workers),
                f"{speed_up:.2f}",
                f"{100 * speed_up * base.workers / row.workers:.0f} %",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
    cells = [" | ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines]
    rule = "|".join("-" * (width + 1) + ":" for width in widths)
    text = "\n".join([f"| {cells[0]} |", f"|{rule}|", *(f"| {line} |" for line in cells[1:])])
    what = f"{table.model}, {base.tokens_per_step:,} tokens a step, {base.strategy}"
    return "\n\n".join([f"{what}\nHardware: {table.hardware}", text, *table.notes]) + "\n"


def _share(share: float | None, workers: int) -> str:
    if share is None:
        return "none" if workers == 1 else NOT_MEASURED
    return f"{100 * share:.1f} %"


def save_table(table: ScalingTable, folder: Path) -> tuple[Path, Path]:
    """Writes scaling.json and scaling.md; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    as_json, as_text = folder / "scaling.json", folder / "scaling.md"
    as_json.write_text(table.to_json(), encoding="utf-8")
    as_text.write_text(markdown(table), encoding="utf-8")
    return as_json, as_text
