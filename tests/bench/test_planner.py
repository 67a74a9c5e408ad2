"""Scoring: errors, baselines, and sources that are judged by constants that have not seen them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from muletrain.bench import planner as module
from muletrain.bench.planner import fit, markdown, memory_error, percentile, score, time_error
from muletrain.bench.points import read_points
from muletrain.cli.app import app
from muletrain.planner.assumptions import Assumptions
from muletrain.planner.job_memory import allocated_bytes, job_ledger
from muletrain.planner.job_time import step_time
from muletrain.spec.errors import InputError

from .points import row, write

TRUTH = replace(
    Assumptions(), reserved=1.2, reserved_varied=2.0, eager_activations=1.3, product=0.6, product_geforce=0.8, eager_passes=2.0
)


def made_up(tmp_path: Path, *, speed: float = 1.0) -> Path:
    """Rows of three sources that a trainer with the constants of TRUTH would have measured; `speed` falsifies source c's."""
    rows = []
    for number, source in enumerate("aaabbbccc"):
        plain = row(
            id=f"r{number}", source_key=source, seq_len=str(512 * (1 + number % 3)),
            activation_checkpointing="none" if number % 2 else "full",
        )  # fmt: skip
        (point,) = read_points(write(tmp_path / "one.csv", plain))
        assert point.job is not None
        tokens_s = point.job.tokens_per_step / step_time(point.job, TRUTH).step_s * (speed if source == "c" else 1.0)
        size = allocated_bytes(job_ledger(point.job, TRUTH)) / 2**30
        rows.append({**plain, "tokens_per_s_total": str(tokens_s), "peak_allocated_gib": str(size)})
    return write(tmp_path / "points.csv", *rows, row(id="odd", seq_len=""))


def test_errors_are_relative_to_what_was_measured(tmp_path: Path) -> None:
    (point,) = read_points(write(tmp_path / "p.csv", row(tokens_per_s_total="1000", peak_allocated_gib="10")))
    assert point.job is not None
    step_s, size = step_time(point.job, TRUTH).step_s, allocated_bytes(job_ledger(point.job, TRUTH))
    assert time_error(point, TRUTH) == pytest.approx(step_s / (4 * 1024 / 1000) - 1)
    assert memory_error(point, TRUTH) == pytest.approx(size / (10 * 2**30) - 1)


def test_a_fit_finds_constants_that_describe_the_rows(tmp_path: Path) -> None:
    points = [point for point in read_points(made_up(tmp_path)) if point.job]
    found = fit(points)
    assert max(abs(time_error(point, found)) for point in points) < 0.1
    assert max(abs(memory_error(point, found)) for point in points) < 0.03


def test_a_source_is_judged_by_the_others(tmp_path: Path) -> None:
    found = score(read_points(made_up(tmp_path, speed=0.5)))
    # source c ran at half the speed that a and b say it should; judged by a and b, its three rows are off by about a half,
    # and a and b, whose fits have seen c, are not
    assert found.time[0].group == "all"
    assert found.time[0].p90 == pytest.approx(0.5, abs=0.12)
    alone = fit([point for point in read_points(made_up(tmp_path, speed=0.5)) if point.source == "c"])
    judged = [point for point in read_points(tmp_path / "points.csv") if point.source == "c"]
    assert max(abs(time_error(point, alone)) for point in judged) < 0.35


def test_baselines(tmp_path: Path) -> None:
    found = score(read_points(made_up(tmp_path)))
    points = [point for point in read_points(tmp_path / "points.csv") if point.job]
    shares = sorted(module._share(point) for point in points)
    assert found.time[0].constant_median == pytest.approx(sorted(abs(share / 0.4 - 1) for share in shares)[4])
    assert 0 <= found.time[0].class_median < 0.3
    assert found.memory[0].constant_median == -1


def test_rows_that_are_not_modelled_are_named(tmp_path: Path) -> None:
    found = score(read_points(made_up(tmp_path)))
    assert (found.rows, found.not_modelled) == (10, {"sequence length not stated": ("odd",)})
    text = markdown(found)
    assert "10 rows, 9 modelled" in text
    assert "not modelled, sequence length not stated: 1 (odd)" in text
    assert "| LoRA | 9 |" in text


def test_M14_fits_that_are_not_and_refusals_of_what_ran(tmp_path: Path) -> None:
    small = row(id="small", outcome="OOM")  # takes 14 GiB of 24 and is said not to have fitted
    huge = row(id="huge", micro_batch_per_gpu="64", activation_checkpointing="none")  # takes hundreds and is said to have run
    found = score(read_points(write(tmp_path / "p.csv", row(), small, huge)))
    assert (found.false_fits, found.out_of_memory) == (("small",), 1)
    assert (found.refused, found.ran) == (("huge",), 2)
    assert "ran, planned not to fit: 1 (huge) of 2 (50.0%)" in markdown(found)


def test_nothing_to_score_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none of the rows can be planned: sequence length not stated"):
        score(read_points(write(tmp_path / "p.csv", row(seq_len=""))))


def test_percentiles() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 1.0], 0.9) == pytest.approx(0.9)
    assert percentile([5.0], 0.9) == 5.0


def test_the_verb_prints_tables_or_json(tmp_path: Path) -> None:
    file = write(tmp_path / "p.csv", row(), row(id="r2", source_key="b"))
    shown = CliRunner().invoke(app, ["bench", "planner", str(file)])
    assert shown.exit_code == 0, shown.output
    assert "| step time | rows |" in shown.stdout
    found = json.loads(CliRunner().invoke(app, ["bench", "planner", str(file), "--json"]).stdout)
    assert (found["schema_version"], found["rows"]) == (1, 2)
