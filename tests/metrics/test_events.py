"""The event file: whole lines, numbers or nothing, and never the end of a run."""

from __future__ import annotations

import json
import os

from muletrain.metrics.events import EventSink, read_events
from muletrain.metrics.memory import peak_memory_bytes
from muletrain.spec.events import StepEvent, WarningEvent


def _step(**changes):
    values = {
        "step": 1, "window": 1, "epoch": 0, "loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 10,
        "padding_tokens": 0, "tokens_per_s": 5.0, "step_s": 2.0, "skipped": False, "loss_scale": 1.0,
        "parts_s": {"compute": 2.0}, "memory_bytes": 1,
    }  # fmt: skip
    return StepEvent(**(values | changes))


def _refuse(message):
    raise AssertionError(message)


def test_events_come_back_and_a_resume_appends(tmp_path):
    path = tmp_path / "events.jsonl"
    for step in (1, 2):
        sink = EventSink(path, _refuse)
        sink.write(_step(step=step))
        sink.close()
    assert [StepEvent(**event) for event in read_events(path)] == [_step(step=1), _step(step=2)]


def test_what_is_no_number_is_absent(tmp_path):
    path = tmp_path / "events.jsonl"
    sink = EventSink(path, _refuse)
    sink.write(_step(grad_norm=float("inf"), loss=float("nan")))
    event = json.loads(path.read_text())
    assert "grad_norm" not in event and "loss" not in event and "model_flops_utilisation" not in event
    assert StepEvent(**event).grad_norm is None


def test_a_half_line_spoils_no_other(tmp_path):
    path = tmp_path / "events.jsonl"
    sink = EventSink(path, _refuse)
    sink.write(_step(step=1))
    with path.open("a") as file:
        file.write('{"kind": "step", "st')
    EventSink(path, _refuse).write(_step(step=2))
    assert [event["step"] for event in read_events(path)] == [1, 2]


def test_O07_a_log_that_cannot_be_written_does_not_end_the_run(tmp_path):
    notices: list[str] = []
    sink = EventSink(tmp_path / "events.jsonl", notices.append)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, sink._descriptor)
    sink.write(WarningEvent(step=1, message="a"))
    sink.write(WarningEvent(step=2, message="b"))
    assert len(notices) == 1 and "No space left" in notices[0]


def test_O07_a_log_that_cannot_be_opened_does_not_end_the_run(tmp_path):
    notices: list[str] = []
    (tmp_path / "events.jsonl").mkdir()
    sink = EventSink(tmp_path / "events.jsonl", notices.append)
    sink.write(WarningEvent(step=1, message="a"))
    sink.close()
    assert notices == [f"{tmp_path / 'events.jsonl'} cannot be written (Is a directory); training goes on without its log"]


def test_a_line_separator_inside_a_message_cuts_no_event(tmp_path):
    sink = EventSink(tmp_path / "events.jsonl", print)
    sink.write(WarningEvent(step=1, message="a\u2028b"))
    sink.close()
    assert [event["message"] for event in read_events(tmp_path / "events.jsonl")] == ["a\u2028b"]


def test_peak_memory_of_a_process_sees_an_allocation():
    before = peak_memory_bytes("cpu")
    block = bytearray(64 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    assert peak_memory_bytes("cpu") >= before
    assert peak_memory_bytes("cpu") > 64 * 2**20
