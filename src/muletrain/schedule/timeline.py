"""A step's timeline as a value that can be saved beside a record: simulated, or measured from the events of a run.

Both have the same ops in the same order, so they can be laid side by side, op by op or by kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from muletrain.schedule.ops import Kind, Op, Resource
from muletrain.spec.value import Value


class OpTime(Value):
    """One op, as in schedule.ops.Op, and when it ran."""

    kind: Kind
    resource: Resource
    unit: int
    wave: int
    micro_batch: int
    piece: int
    start_s: float
    """From the start of the step."""
    end_s: float


class TimelineRecord(Value):
    """One step."""

    source: Literal["simulated", "measured"]
    tokens: int
    step_s: float
    ops: tuple[OpTime, ...]

    def busy_s(self) -> dict[str, float]:
        """Seconds by kind of op, in order of first appearance."""
        total: dict[str, float] = {}
        for op in self.ops:
            total[op.kind] = total.get(op.kind, 0.0) + op.end_s - op.start_s
        return total


def timeline_record(
    source: Literal["simulated", "measured"], tokens: int, spans: Iterable[tuple[Op, float, float]]
) -> TimelineRecord:
    """Of (op, start, end) in the schedule's order, seconds from the same moment; the step ends with its last op."""
    ops = tuple(
        OpTime(
            kind=op.kind, resource=op.resource, unit=op.unit, wave=op.wave, micro_batch=op.micro_batch, piece=op.piece,
            start_s=start, end_s=end,
        )
        for op, start, end in spans
    )  # fmt: skip
    return TimelineRecord(source=source, tokens=tokens, step_s=max((op.end_s for op in ops), default=0.0), ops=ops)
