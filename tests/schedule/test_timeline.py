"""A timeline as a value: its ops, its length, its seconds by kind, and back from JSON."""

from __future__ import annotations

from muletrain.schedule.build import build
from muletrain.schedule.rates import Rates
from muletrain.schedule.simulate import simulate
from muletrain.schedule.timeline import TimelineRecord, timeline_record
from tests.schedule.plans import plan, step

RATES = Rates(compute_flops=10, up_bytes_s=1, down_bytes_s=1, both_bytes_s=1, memory_bytes_s=5)


def test_a_simulated_step_is_recorded_op_by_op() -> None:
    schedule = build(plan(), step(8, 8))
    line = simulate(schedule, RATES)
    record = timeline_record("simulated", line.tokens, zip(schedule.ops, line.start, line.end, strict=True))
    assert (record.step_s, record.tokens, len(record.ops)) == (line.step_s, 16, len(schedule.ops))
    assert [(op.kind, op.unit, op.micro_batch) for op in record.ops] == [(o.kind, o.unit, o.micro_batch) for o in schedule.ops]
    busy = record.busy_s()
    assert sum(busy.values()) == sum(line.busy_s.values())
    assert busy["fetch"] == sum(op.size_bytes for op in schedule.ops if op.kind == "fetch")
    assert TimelineRecord.from_json(record.to_json()) == record


def test_nothing_takes_no_time() -> None:
    assert timeline_record("measured", 0, []).step_s == 0.0
