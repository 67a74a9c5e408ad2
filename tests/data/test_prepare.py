"""Preparing: whole or not at all, the same for any number of processes, taken up after a kill, found again by content."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer

from muletrain.data import dataset, read, units
from muletrain.data import prepare as prepare_module
from muletrain.data.dataset import SCHEMA_VERSION, Prepared, open_prepared
from muletrain.data.prepare import prepare
from muletrain.data.report import report, report_lines
from muletrain.data.tokenizer import TextTokenizer, publish_tokenizer
from muletrain.data.workers import run_jobs
from muletrain.spec.errors import InputError, WorkerFailedError
from muletrain.spec.plan import DataPlan
from tests.data.conftest import text_of, write_rows

Plans = Callable[..., DataPlan]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def texts_of(prepared: Prepared, tokenizer: TextTokenizer, split: dataset.SplitName = "train") -> list[str]:
    documents = prepared.documents(split)
    return [tokenizer.decode(documents.document(i)[1:-1]) for i in range(documents.counts.documents)]


def test_documents_come_back_whole_and_in_order(tmp_path: Path, plan: Plans, tokenizer: TextTokenizer) -> None:
    rows = [{"text": text_of(i, i % 9)} for i in range(50)]
    (tmp_path / "src" / "sub").mkdir(parents=True)
    write_rows(tmp_path / "src" / "a.jsonl", rows)
    (tmp_path / "src" / "sub" / "b.txt").write_text("a whole file\nof text", encoding="utf-8")
    (tmp_path / "src" / "sub" / "c.bin").write_bytes(b"\0\1\2")
    (tmp_path / "src" / "sub" / "d.txt").write_text(" \n")
    prepared = prepare(plan(tmp_path / "src"))
    manifest = prepared.manifest
    expected = [row["text"] for row in rows] + ["a whole file\nof text"]
    assert texts_of(prepared, tokenizer) == expected
    assert (manifest.files, manifest.binary_files, manifest.rows, manifest.empty) == (4, 1, 52, 1)
    assert manifest.train.text_bytes == sum(len(text.encode()) for text in expected)
    documents = prepared.documents("train")
    assert documents.text_bytes.tolist() == [len(text.encode()) for text in expected]
    assert manifest.train.tokens == documents.offsets[-1] == sum(len(tokenizer.encode(text)) for text in expected)
    assert manifest.vocabulary_used == len({i for d in range(51) for i in documents.document(d).tolist()})
    copy = pickle.loads(pickle.dumps(prepared))
    assert copy == prepared and not list(prepared.folder.glob("unit-*"))


def test_same_for_any_number_of_processes(tmp_path: Path, plan: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 2000)
    source = write_rows(tmp_path / "a.jsonl", [{"text": text_of(i, 40)} if i % 10 else i for i in range(120)])
    (tmp_path / "b.txt").write_text(text_of(7, 20), encoding="utf-8")
    one, three = (
        prepare(plan(source, tmp_path / "b.txt", processes=n, cache_dir=str(tmp_path / str(n)), validation_fraction=0.2))
        for n in (1, 3)
    )
    assert contents(one.folder) == contents(three.folder)
    assert len(one.manifest.train.shards) > 3
    rejected = [row.where for row in one.manifest.rejected_rows]
    assert rejected == [f"{source}:{i + 1}" for i in range(0, 120, 10)], "lines are the file's, not the work unit's"


def test_D01_skip_counts_and_stop_lists_them_all(tmp_path: Path, plan: Plans) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"text": "good"}, [], None, {"text": "also good"}, "str"])
    prepared = prepare(plan(source))
    assert (prepared.manifest.rows, prepared.manifest.rejected, prepared.manifest.train.documents) == (5, 3, 2)
    for _ in range(2):  # found in the cache, it still stops
        with pytest.raises(InputError) as caught:
            prepare(plan(source, bad_rows="stop"))
        assert [problem.split(" ")[0] for problem in caught.value.problems[:3]] == [f"{source}:{n}:" for n in (2, 3, 5)]
        assert "data.bad_rows=skip" in caught.value.problems[3]
    shown = "\n".join(report_lines(prepared))
    assert f"{source}:3: the row is null" in shown and "rejected: 3" in shown


def test_D01_more_than_can_be_listed_are_counted(tmp_path: Path, plan: Plans) -> None:
    prepared = prepare(plan(write_rows(tmp_path / "a.jsonl", [{"text": "good"}, *range(1500)])))
    assert prepared.manifest.rejected == 1500 and len(prepared.manifest.rejected_rows) == 1000
    assert "and 1,495 more" in "\n".join(report_lines(prepared))
    with pytest.raises(InputError, match="and 500 more rows"):
        prepare(plan(tmp_path / "a.jsonl", bad_rows="stop"))


def test_found_by_content_not_by_time(tmp_path: Path, plan: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"text": "aaaa"}])
    stamp = os.stat(source).st_mtime_ns
    first = prepare(plan(source))
    write_rows(source, [{"text": "bbbb"}])
    os.utime(source, ns=(stamp, stamp))
    assert prepare(plan(source)).folder != first.folder, "same name, size and time, other content"
    write_rows(source, [{"text": "aaaa"}])
    monkeypatch.setattr(prepare_module, "tokenize_unit", None)  # any work would fail
    assert prepare(plan(source)) == first


def test_R01_moved_files_are_the_same_content(tmp_path: Path, plan: Plans) -> None:
    (tmp_path / "here").mkdir()
    for name in ("b", "a"):
        write_rows(tmp_path / "here" / f"{name}.jsonl", [{"text": f"{name} {text_of(1, 9)}"}])
    before = prepare(plan(tmp_path / "here")).manifest
    (tmp_path / "here").rename(tmp_path / "there")
    moved = prepare(plan(tmp_path / "there")).manifest
    assert moved.content == before.content and moved.fingerprint != before.fingerprint
    (tmp_path / "there" / "a.jsonl").rename(tmp_path / "there" / "z.jsonl")
    assert prepare(plan(tmp_path / "there")).manifest.content != before.content, "documents come in another order"


def test_C08_a_cache_that_cannot_be_written_is_named(tmp_path: Path, plan: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"text": "aaaa"}])
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"data.cache_dir: the data set cannot be written to .*file/datasets: Not a directory"):
        prepare(plan(source, cache_dir=str(tmp_path / "file")))
    with pytest.raises(InputError, match=r"--out: the data set cannot be written to /proc/gone"):
        prepare(plan(source), out=Path("/proc/gone/data"))

    def full(unit: units.Unit) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "shard")

    monkeypatch.setattr(prepare_module, "tokenize_unit", full)
    with pytest.raises(InputError, match=r"No space left on device \(shard\); choose a folder .*; what is done is kept"):
        prepare(plan(source))


def test_the_largest_id_is_known_and_padding_is_within_it(tmp_path: Path, plan: Plans, tokenizer: TextTokenizer) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"text": text_of(i, 9)} for i in range(9)])
    prepared = prepare(plan(source, validation_fraction=0.5))
    ids = [int(prepared.documents(split).document(n).max())
           for split in dataset.SPLITS for n in range(prepared.manifest.split(split).documents)]  # fmt: skip
    assert prepared.manifest.largest_id == max(ids) < prepared.manifest.vocabulary
    dataset.require_vocabulary(prepared, max(ids) + 1, "m")
    with pytest.raises(InputError, match=rf"gives ids up to {max(ids)}, and m has {max(ids)} words"):
        dataset.require_vocabulary(prepared, max(ids), "m")
    folder = tmp_path / "padded"
    shutil.copytree(tokenizer.source, folder)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<pad>"])  # behind the vocabulary, as users do; the model has no row for it
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": "<pad>"}))
    padded = prepare(plan(source, tokenizer=str(folder))).manifest
    assert padded.vocabulary == tokenizer.vocabulary + 1 and padded.pad == padded.eos


def test_bytes_that_are_no_text_are_told(tmp_path: Path, plan: Plans) -> None:
    (tmp_path / "table.parquet").write_bytes(b"PAR1" + bytes(range(256)) * 4)
    with pytest.raises(InputError, match=r"no document to train on in 1 file .*; 1 hold no text but bytes: .*Parquet as JSONL"):
        prepare(plan(tmp_path / "table.parquet"))


def test_every_option_makes_another_data_set(tmp_path: Path, plan: Plans) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"text": text_of(i, 9), "other": "o"} for i in range(9)])
    other = publish_tokenizer(iter(["x"]), 300, tmp_path / "t")
    made = [
        prepare(plan(source, **changes)).manifest.fingerprint
        for changes in ({}, {"text_key": "other"}, {"validation_fraction": 0.3}, {"tokenizer": other.source})
    ]
    assert len(set(made)) == 4
    assert prepare(plan(source, processes=2, sequence_length=7, packing="none")).manifest.fingerprint == made[0]


SLOW = """
import sys, time
from pathlib import Path
from muletrain.data import units, prepare as p
from muletrain.spec.plan import DataPlan
if __name__ == "__main__":
    units.UNIT_BYTES = 2000
    plan = DataPlan.load(Path(sys.argv[1]))
    def show(stage, done, total):
        print(stage, done, flush=True)
        if stage == "tokenize" and done and sys.argv[2] == "slow":
            time.sleep(60)
    print("folder", p.prepare(plan, progress=show).folder, flush=True)
"""


def start(tmp_path: Path, plan: DataPlan, speed: str) -> subprocess.Popen[str]:
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    command = [sys.executable, str(tmp_path / "slow.py"), str(tmp_path / "plan.json"), speed]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("processes", [1, 2])
def test_taken_up_after_a_kill_and_no_process_left(
    tmp_path: Path, plan: Plans, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"text": text_of(i, 40)} for i in range(100)])
    killed = start(tmp_path, plan(source, processes=processes), "slow")
    assert killed.stdout
    while (line := killed.stdout.readline().split()) and not (line[0] == "tokenize" and int(line[1])):
        assert killed.poll() is None
    children = psutil.Process(killed.pid).children(recursive=True)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert not list((tmp_path / "cache" / "datasets").glob("*/dataset.json")), "nothing was published"
    done = {int(path.stem[5:]) for path in (tmp_path / "cache" / "datasets").glob(".*.partial/unit-*.json")}
    assert done
    monkeypatch.setattr(units, "UNIT_BYTES", 2000)
    worked: list[int] = []
    monkeypatch.setattr(prepare_module, "tokenize_unit", lambda unit: worked.append(unit.number) or units.tokenize_unit(unit))
    resumed = prepare(plan(source))
    assert worked and not done & set(worked), "finished units are not done again"
    whole = prepare(plan(source, cache_dir=str(tmp_path / "whole")))
    assert contents(resumed.folder) == contents(whole.folder)


def test_two_at_once_make_one(tmp_path: Path, plan: Plans) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"text": text_of(i, 40)} for i in range(200)])
    both = [start(tmp_path, plan(source), "fast") for _ in range(2)]
    folders = [process.communicate(timeout=60)[0].splitlines()[-1] for process in both]
    assert folders[0] == folders[1] and folders[0].startswith("folder")
    open_prepared(Path(folders[0].removeprefix("folder ")))
    assert not list((tmp_path / "cache" / "datasets").glob(".*.partial"))


def die(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def fail(number: int) -> int:
    if number == 0:
        raise InputError("the first job fails")
    time.sleep(60)
    return number


def test_a_killed_process_is_told_with_its_cause() -> None:
    with pytest.raises(WorkerFailedError, match="memory"):
        list(run_jobs(die, range(6), 2))


def test_a_failing_job_ends_the_others_at_once() -> None:
    begin = time.monotonic()
    with pytest.raises(InputError, match="first job"):
        list(run_jobs(fail, range(4), 2))
    assert time.monotonic() - begin < 30
    assert list(run_jobs(abs, [-1], 8)) == [1]


def test_a_prepared_folder_is_a_source(tmp_path: Path, plan: Plans, rows_of: Callable[..., Prepared]) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"text": text_of(i, 9)} for i in range(9)])
    out = tmp_path / "out"
    made = prepare(plan(source), out=out)
    assert made.folder == out and prepare(plan(out)) == made and prepare(plan(source), out=out) == made
    other = publish_tokenizer(iter(["x"]), 300, tmp_path / "t")
    with pytest.raises(InputError, match="another tokenizer"):
        prepare(plan(out, tokenizer=other.source))
    with pytest.raises(InputError, match="stands alone"):
        prepare(plan(out, source))
    with pytest.raises(InputError, match="prepared data set already"):
        prepare(plan(out), out=tmp_path / "again")
    with pytest.raises(InputError, match="other content"):
        prepare(plan(source, validation_fraction=0.3), out=out)
    with pytest.raises(InputError, match="is not empty and not a data set"):
        prepare(plan(source), out=source.parent)


def test_a_damaged_data_set_is_told(rows_of: Callable[..., Prepared]) -> None:
    folder = rows_of(9).folder
    manifest = (folder / "dataset.json").read_text()
    shard = next(folder.glob("*.tokens"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    with pytest.raises(InputError, match="bytes expected"):
        open_prepared(folder)
    shard.unlink()
    with pytest.raises(InputError, match="missing"):
        open_prepared(folder)
    shard.write_bytes(whole)
    (folder / "dataset.json").write_text(manifest.replace(f'"schema_version": {SCHEMA_VERSION}', '"schema_version": 99'))
    with pytest.raises(InputError, match="schema_version 99"):
        open_prepared(folder)
    (folder / "dataset.json").write_text("{}")
    with pytest.raises(InputError, match="written by another version, or damaged"):
        open_prepared(folder)
    (folder / "dataset.json").unlink()
    with pytest.raises(InputError, match="not a prepared data set"):
        open_prepared(folder)


def test_validation_is_chosen_by_content(tmp_path: Path, plan: Plans, tokenizer: TextTokenizer) -> None:
    rows = [{"text": text_of(i, 5)} for i in range(400)]
    first = prepare(plan(write_rows(tmp_path / "a.jsonl", rows), validation_fraction=0.2))
    again = prepare(plan(write_rows(tmp_path / "b.jsonl", rows[::-1]), validation_fraction=0.2))
    held_out = texts_of(first, tokenizer, "validation")
    assert sorted(held_out) == sorted(texts_of(again, tokenizer, "validation"))
    assert 50 < len(held_out) < 110
    assert sorted(held_out + texts_of(first, tokenizer)) == sorted(row["text"] for row in rows)


def test_an_empty_validation_split_is_said(tmp_path: Path, plan: Plans) -> None:
    prepared = prepare(
        plan(write_rows(tmp_path / "a.jsonl", [{"text": text_of(i, 5)} for i in range(30)]), validation_fraction=1e-9)
    )
    assert "no document of 30 fell to validation" in "\n".join(report_lines(prepared))


def test_nothing_to_train_on_is_an_error(tmp_path: Path, plan: Plans) -> None:
    with pytest.raises(InputError, match=r"no document to train on in 1 file \(2 rows: 1 rejected, 1 empty"):
        prepare(plan(write_rows(tmp_path / "a.jsonl", [[], {"text": ""}])))
    one = next(
        text for text in map(str, range(100)) if units._split(read.Document(text, text.encode(), False), 0.5) == "validation"
    )
    with pytest.raises(InputError, match="all 1 documents fell to validation"):
        prepare(plan(write_rows(tmp_path / "b.jsonl", [{"text": one}]), validation_fraction=0.5))


def test_D06_cuts_are_counted(tmp_path: Path, plan: Plans, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "DOCUMENT_LIMIT_BYTES", 100)
    text = "ab cd " * 60
    prepared = prepare(plan(write_rows(tmp_path / "a.jsonl", [{"text": text}])))
    assert prepared.manifest.cut == 3 and prepared.manifest.train.documents == 4
    assert "".join(texts_of(prepared, tokenizer)) == text
    assert "cut: 3 cuts in documents over 100 bytes" in "\n".join(report_lines(prepared))


def test_T02_T12_each_document_ends_once(tmp_path: Path, plan: Plans) -> None:
    prepared = prepare(plan(write_rows(tmp_path / "a.jsonl", [{"text": "x </s> y"}, {"text": "</s></s>"}, {"text": "z"}])))
    documents = prepared.documents("train")
    for number in range(3):
        ids = documents.document(number).tolist()
        assert (ids[0], ids[-1], ids.count(0), ids.count(1)) == (0, 1, 1, 1)


def test_report_says_it_all(rows_of: Callable[..., Prepared], tokenizer: TextTokenizer) -> None:
    prepared = rows_of(40, validation_fraction=0.2)
    value = json.loads(json.dumps(report(prepared, 32, "best_fit", tokenizer, 2)))
    assert value["schema_version"] == 2 and len(value["first_documents"]) == 2
    pairs = int((np.diff(prepared.documents("train").offsets) - 1).sum())
    assert value["packing"]["trained_tokens"] == pairs
    assert value["packing"]["fill"] == pytest.approx(pairs / (value["packing"]["packed_rows"] * 32), abs=1e-5)
    assert value["train"]["documents"] + value["validation"]["documents"] == 40
    assert f"{value['packing']['packed_rows']:,} packed rows" in report_lines(prepared, 32)[-1]
