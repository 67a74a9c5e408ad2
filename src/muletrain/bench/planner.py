"""The planner scored against published measurements: errors by class, each source left out in turn, beside two baselines.

An error is |predicted / measured - 1|, of step time and of memory on a card. Constants marked (fitted) in planner.assumptions
are fitted to all other sources before a source is judged, so none is judged by constants that have seen it. Formulas and the
other constants are the same for all; they were found with such rows in view. Baselines for time: 40 % of the dense 16-bit peak
for every row, and the median share of the peak that the same class reached in other sources.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from muletrain.bench.points import Point
from muletrain.planner.assumptions import Assumptions
from muletrain.planner.job import Job
from muletrain.planner.job_memory import allocated_bytes, device_bytes, job_ledger, needed_bytes, reserved_bytes
from muletrain.planner.job_time import step_time
from muletrain.spec.errors import InputError
from muletrain.spec.value import Value

MEMORY_FIT = {"reserved": (1.0, 1.5), "reserved_varied": (1.0, 3.0), "eager_activations": (1.0, 1.8)}
TIME_FIT = {
    "product": (0.5, 0.95), "product_geforce": (0.7, 1.1), "fp8_over_16": (1.2, 2.0), "eager_passes": (1.0, 6.0),
    "kernel_s": (4e-6, 30e-6), "attention": (0.5, 1.2), "overlap": (0.0, 1.0), "overlap_eager": (0.0, 1.0), "other": (1.0, 1.5),
}  # fmt: skip
"""Fitted constants and where they may lie."""
SPARE = 0.05
"""An out-of-memory row that is planned to fit with more than this to spare is a false fit."""
CLASSES = ("one card", "PCIe multi", "NVLink", "offload", "LoRA")
_MOST = 0.7
"""Log errors beyond this pull no harder in a fit: such rows say that something is not as described."""


class ErrorRow(Value):
    """One class."""

    group: str
    rows: int
    median: float
    p90: float
    constant_median: float = -1.0
    """Baseline: 40 % of peak. -1: none for memory."""
    class_median: float = -1.0
    """Baseline: the class's median share of peak in other sources."""


class PlannerScore(Value):
    """What `mule bench planner` prints."""

    schema_version: int = 1
    rows: int
    time: tuple[ErrorRow, ...]
    memory: tuple[ErrorRow, ...]
    false_fits: tuple[str, ...]
    """Rows that ran out of memory and were planned to fit with more than 5 % to spare."""
    out_of_memory: int
    refused: tuple[str, ...]
    """Rows that ran and were planned not to fit."""
    ran: int
    not_modelled: dict[str, tuple[str, ...]]
    """Rows by reason."""
    not_timed: dict[str, tuple[str, ...]]
    """Rows whose speed is not that of the work they state, by reason; their memory is scored."""
    fitted: dict[str, float]
    """Constants fitted to all sources."""


def score(points: Sequence[Point]) -> PlannerScore:
    """Everything. Takes about a second a source: each gets its own fit. Raises InputError where no row is modelled."""
    modelled = [point for point in points if point.job]
    if not modelled:
        raise InputError("none of the rows can be planned: " + "; ".join(sorted({point.reason for point in points})))
    everything = fit(modelled)
    by_source = {
        source: fit([point for point in modelled if point.source != source])
        for source in dict.fromkeys(point.source for point in modelled)
    }
    time = {point.name: (point, time_error(point, by_source[point.source])) for point in _timed(modelled)}
    memory = {point.name: (point, memory_error(point, by_source[point.source])) for point in _sized(modelled)}
    ran = [point for point in modelled if point.ran and point.reliable]
    failed = [point for point in modelled if not point.ran]
    return PlannerScore(
        rows=len(points),
        time=_table(time.values(), modelled),
        memory=_table(memory.values(), ()),
        false_fits=tuple(p.name for p in failed if _fill(p, by_source[p.source]) < 1 - SPARE),
        out_of_memory=len(failed),
        refused=tuple(p.name for p in ran if _fill(p, by_source[p.source]) > 1),
        ran=len(ran),
        not_modelled=_named((point.name, point.reason) for point in points if not point.job),
        not_timed=_named((point.name, point.untimed) for point in modelled if point.untimed),
        fitted={name: getattr(everything, name) for name in (*MEMORY_FIT, *TIME_FIT)},
    )


def markdown(found: PlannerScore) -> str:
    """For a person."""
    lines = [
        f"{found.rows} rows, {found.rows - sum(map(len, found.not_modelled.values()))} modelled; "
        "constants fitted without the source that is judged",
        "",
        "| step time | rows | median error | 90th percentile | 40 % of peak | class median |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in found.time:
        baseline = f"{row.class_median:.1%}" if row.class_median >= 0 else "none"
        lines.append(
            f"| {row.group} | {row.rows} | {row.median:.1%} | {row.p90:.1%} | {row.constant_median:.1%} | {baseline} |"
        )
    lines += ["", "| memory on a card | rows | median error | 90th percentile |", "|---|--:|--:|--:|"]
    lines += [f"| {row.group} | {row.rows} | {row.median:.1%} | {row.p90:.1%} |" for row in found.memory]
    lines += [
        "",
        f"ran out of memory, planned to fit with more than {SPARE:.0%} to spare: "
        f"{_some(found.false_fits)} of {found.out_of_memory}",
        f"ran, planned not to fit: {_some(found.refused)} of {found.ran} ({len(found.refused) / max(1, found.ran):.1%})",
    ]
    lines += [f"not modelled, {reason}: {_some(names)}" for reason, names in found.not_modelled.items()]
    lines += [f"not timed, {reason}: {_some(names)}" for reason, names in found.not_timed.items()]
    lines.append("fitted: " + ", ".join(f"{name} {value:.3g}" for name, value in found.fitted.items()))
    return "\n".join(lines) + "\n"


def _some(names: Sequence[str], most: int = 6) -> str:
    shown = ", ".join(names[:most]) + (", …" if len(names) > most else "")
    return f"{len(names)}" + (f" ({shown})" if names else "")


def _named(pairs: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for name, reason in pairs:
        found.setdefault(reason, []).append(name)
    return {reason: tuple(names) for reason, names in sorted(found.items(), key=lambda each: -len(each[1]))}


def time_error(point: Point, assumed: Assumptions) -> float:
    """Of step time."""
    return step_time(_job(point), assumed).step_s / _measured_s(point) - 1


def memory_error(point: Point, assumed: Assumptions) -> float:
    """Of what the row measured: allocated, reserved or the device's whole use."""
    job = _job(point)
    ledger = job_ledger(job, assumed)
    predicted = {"allocated": allocated_bytes, "reserved": reserved_bytes, "device": device_bytes}
    return predicted[point.memory_kind](ledger) / point.memory_bytes - 1


def fit(points: Sequence[Point]) -> Assumptions:
    """The fitted constants that describe `points` best: one after another, finer and finer, memory then time.

    From the middle of each range, not from the defaults, which have seen all sources.
    """
    sized, timed = _sized(points), _timed(points)
    middle = {name: (low + high) / 2 for name, (low, high) in (*MEMORY_FIT.items(), *TIME_FIT.items())}
    start = replace(Assumptions(), **middle)
    found = _search(start, MEMORY_FIT, lambda assumed: _loss((p, memory_error(p, assumed)) for p in sized))
    return _search(found, TIME_FIT, lambda assumed: _loss((p, time_error(p, assumed)) for p in timed))


def _search(start: Assumptions, ranges: Mapping[str, tuple[float, float]], loss: Callable[[Assumptions], float]) -> Assumptions:
    best, least = start, loss(start)
    for width in (0.3, 0.15, 0.07, 0.03):
        for name, (low, high) in ranges.items():
            for step in (-width, width):
                value = min(high, max(low, getattr(best, name) + step * (high - low)))
                tried = replace(best, **{name: value})
                got = loss(tried)
                if got < least:
                    best, least = tried, got
    return best


def _loss(errors: Iterable[tuple[Point, float]]) -> float:
    """Mean absolute log error, each source weighing by the root of its rows."""
    by_source: dict[str, list[float]] = {}
    for point, error in errors:
        by_source.setdefault(point.source, []).append(min(_MOST, abs(math.log(max(1e-9, 1 + error)))))
    weight = {source: math.sqrt(len(found)) for source, found in by_source.items()}
    total = sum(weight.values())
    return sum(weight[source] * statistics.fmean(found) for source, found in by_source.items()) / total if total else 0.0


def _table(scored: Iterable[tuple[Point, float]], timed: Sequence[Point]) -> tuple[ErrorRow, ...]:
    pairs = list(scored)
    rows = [_row(group, [pair for pair in pairs if pair[0].group == group], timed) for group in CLASSES]
    return tuple(row for row in (_row("all", pairs, timed), *rows) if row.rows)


def _row(group: str, pairs: list[tuple[Point, float]], timed: Sequence[Point]) -> ErrorRow:
    errors = [abs(error) for _, error in pairs]
    if not errors:
        return ErrorRow(group=group, rows=0, median=0.0, p90=0.0)
    row = ErrorRow(group=group, rows=len(errors), median=statistics.median(errors), p90=percentile(errors, 0.9))
    if not timed:
        return row
    constant = [abs(_share(point) / 0.4 - 1) for point, _ in pairs]
    others = [abs(_share(point) / share - 1) for point, _ in pairs if (share := _class_share(point, timed))]
    return row.model_copy(
        update={
            "constant_median": statistics.median(constant),
            "class_median": statistics.median(others) if others else -1.0,
        }
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Between neighbours, linearly."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _share(point: Point) -> float:
    """Of the dense 16-bit peak that the row reached in model FLOPs."""
    job = _job(point)
    peak = job.card.flops.get("bf16") or job.card.flops["fp16"]
    return job.shape.flops_a_token(job.sequence) * point.tokens_per_s / job.cards / peak


def _class_share(point: Point, points: Sequence[Point]) -> float:
    found = [_share(p) for p in _timed(points) if p.group == point.group and p.source != point.source]
    return statistics.median(found) if found else 0.0


def _fill(point: Point, assumed: Assumptions) -> float:
    """Of the card's memory that the plan takes."""
    job = _job(point)
    return needed_bytes(job, assumed) / job.card.memory_bytes


def _timed(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if point.job and point.tokens_per_s and point.ran and point.reliable]


def _sized(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if point.job and point.memory_bytes and point.ran and point.reliable]


def _measured_s(point: Point) -> float:
    return _job(point).tokens_per_step / point.tokens_per_s


def _job(point: Point) -> Job:
    assert point.job is not None
    return point.job
