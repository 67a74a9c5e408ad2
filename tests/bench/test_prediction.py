"""The comparison is arithmetic on what it is given: ratios, memory, seconds by kind, and two files."""

from __future__ import annotations

from pathlib import Path

import pytest

from muletrain.bench.prediction import compare, save_timelines
from muletrain.planner.prediction import predict
from muletrain.planner.resolve import resolve
from muletrain.schedule.ops import Op
from muletrain.schedule.timeline import TimelineRecord
from tests.planner.boxes import H200, box, request

MACHINE = box(H200, host_gib=512)
PLAN = resolve(request({"memory.strategy": "streamed", "precision.compute": "bf16", "parallel.workers": 1}), MACHINE)
SPANS = [(Op(0, "fetch", "up", unit=0), 0.0, 0.25), (Op(1, "forward", "compute", unit=0, micro_batch=0), 0.25, 2.0)]


def test_a_run_beside_its_prediction(tmp_path: Path) -> None:
    predicted = predict(PLAN, MACHINE)
    planned = predicted.ledger.total("card")
    found, simulated, measured = compare(PLAN, MACHINE, SPANS, 2 * predicted.step_s, 3 * planned)
    assert (found.ratio, found.memory_ratio) == (2.0, 3.0)
    assert found.of_bound == pytest.approx(predicted.bound_s / predicted.step_s / 2)
    assert found.of_resource_bound == pytest.approx(predicted.resource_bound_s / predicted.step_s / 2)
    assert sum(found.planned_parts.values()) == found.planned_bytes == planned
    assert found.measured_busy_s == {"fetch": 0.25, "forward": 1.75}
    assert simulated == predicted.timeline and measured.step_s == 2.0
    text = found.text()
    assert "2.000 of it; bound" in text and "3.000 of it\n" in text and "fetch" in text and "/1.750" in text
    paths = save_timelines(tmp_path, "tiny-4096", simulated, measured)
    assert [path.name for path in paths] == ["timeline-tiny-4096-simulated.json", "timeline-tiny-4096-measured.json"]
    assert TimelineRecord.load(paths[0]) == simulated
