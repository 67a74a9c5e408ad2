"""Proves that no op of a schedule reads what is not there yet, or writes what is still to be read.

An op happens before another if the order on a resource and the `after` edges say so, in any number of steps; everything else
may happen in any order, at once. The proof does not use how `build` found its edges: it needs only the ops' buffers, and what
each reader of a place expects in it.
"""

from __future__ import annotations

from muletrain.schedule.layout import Layout
from muletrain.schedule.ops import Buffer, Op, Schedule, ScheduleError
from muletrain.schedule.program import Clocks

_FROM_START = frozenset({"host_parameters", "host_state", "card_state", "sums", "flag"})


def check(schedule: Schedule) -> None:
    """Raises ScheduleError naming the two ops at fault. O(ops x (buffers an op + resources))."""
    ops = schedule.ops
    filled = Layout(schedule.plan).filled(schedule.step.pending)
    from_start = _FROM_START | ({"host_gradient"} if schedule.step.pending else frozenset())
    clocks = Clocks()
    writer: dict[Buffer, Op] = {}
    readers: dict[Buffer, list[Op]] = {}
    for position, op in enumerate(ops):
        if op.id != position or any(earlier >= op.id for earlier in op.after):
            raise ScheduleError(f"{describe(op)} stands at {position} of the list, or waits for a later op")
        clocks.advance(op.resource, sorted(op.after, reverse=True))
        for buffer in op.reads:
            source = writer.get(buffer)
            if source is None:
                if buffer.place not in from_start and buffer not in filled:
                    raise ScheduleError(f"{describe(op)} reads {_name(buffer)}, which no op has written")
            else:
                if not clocks.ordered(source.id, op.id):
                    raise ScheduleError(f"{describe(op)} reads {_name(buffer)} without waiting for {describe(source)}")
                if not is_meant_for(source, buffer, op):
                    raise ScheduleError(f"{describe(op)} reads {_name(buffer)}, overwritten by {describe(source)}")
            readers.setdefault(buffer, []).append(op)
        for buffer in op.writes:
            source = writer.get(buffer)
            if source is not None and not clocks.ordered(source.id, op.id):
                raise ScheduleError(
                    f"{describe(op)} writes {_name(buffer)} without waiting for {describe(source)}, which also does"
                )
            for reader in readers.get(buffer, ()):
                if reader is not op and not clocks.ordered(reader.id, op.id):
                    raise ScheduleError(
                        f"{describe(op)} overwrites {_name(buffer)} without waiting for its reader {describe(reader)}"
                    )
            writer[buffer] = op
            readers[buffer] = []


def describe(op: Op) -> str:
    """An op for a person: kind and what it is about."""
    numbers = (("unit", op.unit), ("wave", op.wave), ("micro-batch", op.micro_batch), ("piece", op.piece))
    about = ", ".join(f"{name} {number}" for name, number in numbers if number >= 0)
    return f"op {op.id} {op.kind} ({about})" if about else f"op {op.id} {op.kind}"


def _name(buffer: Buffer) -> str:
    return f"{buffer.place}{list(buffer.index)}"


def is_meant_for(source: Op, buffer: Buffer, reader: Op) -> bool:
    """Whether what `source` put into `buffer` is what `reader` expects there."""
    same_unit, same_micro_batch = source.unit == reader.unit, source.micro_batch == reader.micro_batch
    match buffer.place:
        case "slot" | "gradient" | "host_parameters" | "host_gradient" | "ring":
            return same_unit and (buffer.place != "ring" or source.wave == reader.wave)
        case "staging" | "host_state" | "card_state" | "parts":
            return same_unit and source.piece == reader.piece
        case "input":
            return same_micro_batch and (same_unit if source.kind == "receive" else source.unit == reader.unit - 1)
        case "hidden_gradient":
            return same_micro_batch and source.unit == reader.unit + 1
        case "kept" | "host_input" | "host_kept":
            return same_unit and same_micro_batch
        case "sums" | "flag":
            return True
