"""A streamed run beside what was predicted of it: step time, device memory, the bound, and time by kind of op.

What is predicted comes from the run's Plan and the rates that `mule probe` measured; what is measured comes from the run. To be
held: step time within 10 %, device memory within 5 %, at least 0.93 of the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from muletrain.planner.prediction import Prediction, predict
from muletrain.schedule.ops import Op
from muletrain.schedule.timeline import TimelineRecord, timeline_record
from muletrain.spec.machine import Machine
from muletrain.spec.plan import Plan
from muletrain.spec.value import Value

_GIB = 2**30


class Compared(Value):
    """One configuration. Ratios are measured over simulated."""

    tokens: int
    simulated_s: float
    measured_s: float
    ratio: float
    bound_s: float
    of_bound: float
    """The bound over the measured step: 1 is as fast as any order could be."""
    of_resource_bound: float
    """The same with the bound of the busiest resource alone."""
    planned_bytes: int
    device_bytes: int
    memory_ratio: float
    planned_parts: dict[str, int]
    simulated_busy_s: dict[str, float]
    """By kind of op, both directions of the link included."""
    measured_busy_s: dict[str, float]
    rates: str
    """Where the rates are from."""

    def text(self) -> str:
        """Two lines for a person."""
        kinds = dict.fromkeys((*self.simulated_busy_s, *self.measured_busy_s))
        busy = ", ".join(
            f"{kind} {self.simulated_busy_s.get(kind, 0.0):.3f}/{self.measured_busy_s.get(kind, 0.0):.3f}" for kind in kinds
        )
        return (
            f"   simulated {self.simulated_s:.3f} s, measured {self.measured_s:.3f} s: {self.ratio:.3f} of it; bound "
            f"{self.bound_s:.3f} s, {self.of_bound:.3f} of it reached (of the busiest resource alone "
            f"{self.of_resource_bound:.3f}); device planned {self.planned_bytes / _GIB:.2f} GiB, "
            f"measured {self.device_bytes / _GIB:.2f} GiB: {self.memory_ratio:.3f} of it\n   simulated/measured busy s: {busy}"
        )


def compare(
    plan: Plan, machine: Machine, spans: Sequence[tuple[Op, float, float]], step_s: float, device_bytes: int
) -> tuple[Compared, TimelineRecord, TimelineRecord]:
    """(the comparison, simulated timeline, measured timeline) of a streamed run.

    `spans`: (op, start, end) of one traced step, seconds; `step_s`: of steps that were not traced; `device_bytes`: used on the
    card as the driver sees it, context included. Raises InputError where `machine` has no rates for the run.
    """
    predicted: Prediction = predict(plan, machine)
    assert predicted.timeline is not None
    measured = timeline_record("measured", predicted.tokens, spans)
    planned = predicted.ledger.total("card")
    compared = Compared(
        tokens=predicted.tokens,
        simulated_s=predicted.step_s,
        measured_s=step_s,
        ratio=step_s / predicted.step_s,
        bound_s=predicted.bound_s,
        of_bound=predicted.bound_s / step_s,
        of_resource_bound=predicted.resource_bound_s / step_s,
        planned_bytes=planned,
        device_bytes=device_bytes,
        memory_ratio=device_bytes / planned,
        planned_parts={item.part: item.size_bytes for item in predicted.ledger.items if item.place == "card"},
        simulated_busy_s=predicted.timeline.busy_s(),
        measured_busy_s=measured.busy_s(),
        rates=predicted.source,
    )
    return compared, predicted.timeline, measured


def save_timelines(folder: Path, name: str, *records: TimelineRecord) -> list[Path]:
    """Writes each as `folder/timeline-NAME-SOURCE.json`."""
    paths = []
    for record in records:
        paths.append(folder / f"timeline-{name}-{record.source}.json")
        paths[-1].write_text(record.model_dump_json(), encoding="utf-8")
    return paths
