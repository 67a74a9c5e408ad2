"""The table, from run folders with known content: what is computed, what is said, what is never made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muletrain.bench.scaling import ScalingTable, markdown, measure, save_table, table_of
from muletrain.spec.errors import InputError, StoppedError, WorkerFailedError
from muletrain.spec.events import RunRecord
from muletrain.spec.machine import Gpu, Machine
from tests.train.tiny import make_plan

CPU = Machine(hostname="h", cpu="Testcore 3", cores=2, host_memory_bytes=8 * 2**30)


@pytest.fixture
def finished(materials, tmp_path):
    """finished(workers, speeds, ...): a run folder as a session leaves it."""

    def make(workers: int, speeds: list[float], machine: Machine = CPU, name: str = "", **changes) -> Path:
        folder = tmp_path / (name or f"workers-{workers}")
        folder.mkdir()
        exposed = {"communication_exposed": changes.pop("exposed", None), "communication_overlapped": changes.pop("over", None)}
        plan = make_plan(materials, folder, workers=workers, **changes)
        (folder / "plan.json").write_text(plan.to_json())
        (folder / "machine.json").write_text(machine.to_json())
        events = [{"kind": "start"}, *({"kind": "step", "tokens_per_s": s, "skipped": False} for s in speeds), {"kind": "end"}]
        (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        record = RunRecord(
            outcome="finished", steps=len(speeds), skipped=0, tokens=1, seconds=1.0, tokens_per_s=1.0,
            peak_memory_bytes=workers * 2**30, workers=workers, strategy="zero3", device="d", **exposed,
        )  # fmt: skip
        (folder / "record.json").write_text(record.to_json())
        return folder

    return make


def test_medians_speed_up_and_efficiency_without_the_first_steps(finished):
    one = finished(1, [1.0, 2.0, 100.0, 90.0, 110.0])
    three = finished(3, [1.0, 2.0, 140.0, 150.0, 900.0], exposed=0.25)
    table = table_of([three, one])
    assert [row.workers for row in table.rows] == [1, 3]
    assert [row.tokens_per_s for row in table.rows] == [100.0, 150.0]
    assert (table.rows[1].tokens_per_s_low, table.rows[1].tokens_per_s_high, table.rows[1].steps) == (140.0, 900.0, 3)
    line = next(line for line in markdown(table).splitlines() if line.startswith("|       3"))
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        "3", "150", "140 to 900 (n=3)", "3.0 GiB", "25.0 %", "not measured", "1.50", "50 %",
    ]  # fmt: skip


def test_what_was_not_measured_is_never_zero(finished):
    text = markdown(table_of([finished(1, [5.0] * 4), finished(2, [5.0] * 4)]))
    assert text.count("not measured |") == 2
    assert " 0.0 %" not in text
    assert "Overlapped communication is not measured" in text


def test_an_efficiency_over_100_percent_is_no_gain(finished):
    disturbed = table_of([finished(1, [1.0] * 4), finished(3, [40.0] * 4)])
    assert any("something else slowed the first row down" in note for note in disturbed.notes)
    sound = table_of([finished(1, [5.0] * 4, name="a"), finished(3, [4.0] * 4, name="b")])
    assert not any("slowed" in note for note in sound.notes)


def test_shared_cores_are_said_plainly_and_gpus_are_not_accused(finished):
    cpu = table_of([finished(1, [5.0] * 4), finished(3, [4.0] * 4)])
    assert any("No speed-up is to be expected" in note and "2 CPU cores" in note for note in cpu.notes)
    box = CPU.model_copy(update={"gpus": (Gpu(name="Card", memory_bytes=1, capability=(8, 9), driver="570.1"),) * 2})
    gpu = table_of([finished(2, [4.0] * 4, machine=box, device="cuda", exposed=0.1, over=0.2, name="gpu")])
    assert gpu.notes == ()
    assert gpu.hardware.startswith("2 x Card (570.1), 2 cores of Testcore 3")


def test_only_the_last_session_counts(finished):
    run = finished(1, [9.0, 9.0, 9.0])
    later = [
        {"kind": "resume"},
        *({"kind": "step", "tokens_per_s": 5.0, "skipped": skip} for skip in (False, True, False, False)),
    ]
    with (run / "events.jsonl").open("a") as file:
        file.write("".join(json.dumps(event) + "\n" for event in later) + '{"kind": "st')
    row = table_of([run]).rows[0]
    assert (row.tokens_per_s, row.steps) == (5.0, 1), "a skipped step is no measurement, two first ones are dropped"


def test_different_work_is_refused_or_said(finished, materials):
    one, two = finished(1, [5.0] * 4), finished(2, [5.0] * 4, micro_batches=8)
    assert any("differ in tokens a step" in note for note in table_of([one, two]).notes)
    other = materials.model.model_copy(update={"shape": materials.model.shape.model_copy(update={"name": "another"})})
    plan = make_plan(materials, two).model_copy(update={"model": other})
    (two / "plan.json").write_text(plan.to_json())
    with pytest.raises(InputError, match=r"the runs are of different models"):
        table_of([one, two])


def test_a_folder_without_an_ended_run_is_named(finished, tmp_path):
    with pytest.raises(InputError, match=r"plan\.json: there is no such file; give a run folder whose training has ended"):
        table_of([tmp_path])
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(InputError, match=r"plan\.json: damaged, or of another version \("):
        table_of([tmp_path])
    with pytest.raises(InputError, match=r"its last session has no step event; log.every may be larger"):
        table_of([finished(1, [])])


def test_the_table_is_saved_and_comes_back(finished, tmp_path):
    table = table_of([finished(1, [5.0] * 4)])
    as_json, as_text = save_table(table, tmp_path / "out")
    assert ScalingTable.load(as_json) == table
    assert as_text.read_text() == markdown(table)


def test_runs_are_started_in_order_and_a_bad_end_is_not_a_number(tmp_path):
    started: list[tuple[int, str]] = []
    folders = measure(lambda workers, folder: started.append((workers, folder.name)) or 0, [1, 3], tmp_path)
    assert started == [(1, "workers-1"), (3, "workers-3")]
    assert folders == [tmp_path / "workers-1", tmp_path / "workers-3"]
    with pytest.raises(WorkerFailedError, match="the run on 1 workers ended with exit code 4"):
        measure(lambda workers, folder: 4, [1], tmp_path)
    with pytest.raises(StoppedError, match="a signal stopped the run on 1 workers"):
        measure(lambda workers, folder: 75, [1], tmp_path)
