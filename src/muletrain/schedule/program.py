"""A step as a sequential program, from which the dependencies follow.

`build` writes down what happens as if one worker did everything in turn, naming the buffers each op reads and writes. Who must
wait for whom is then not a matter of thought at each op: an op waits for the last writer of what it reads, and for the last
writer and the readers of what it overwrites. `listed` turns the program into a schedule: an order of issue that lets transfers
run ahead as far as their destinations are free, and only those `after` edges that nothing else implies.

Rejected: writing the edges by hand beside each op (the first thing to rot when an op is added).
"""

from __future__ import annotations

import heapq
from typing import Final

from muletrain.schedule.ops import Buffer, Kind, Op, Resource

RESOURCES: Final[tuple[Resource, ...]] = ("compute", "update", "up", "down", "peers", "sums", "host")
NUMBER: Final[dict[Resource, int]] = {name: number for number, name in enumerate(RESOURCES)}
_IN_PROGRAM_ORDER: Final = frozenset({"compute", "update", "peers", "sums", "host"})
"""Resources whose order of issue is the program's own. The links' order is found by `listed`."""

Clock = tuple[int, ...]
"""By resource: how many of its ops are complete."""


class _Access:
    """Who touched one buffer last."""

    __slots__ = ("readers", "writer")

    def __init__(self) -> None:
        self.writer = -1
        self.readers: dict[str | int, int] = {}


class Program:
    """Ops in program order: their ids are positions in it, their `after` all that they conflict with."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._accesses: dict[Buffer, _Access] = {}
        self._behind: dict[int, list[int]] = {}
        self._last: dict[Resource, int] = {}

    def add(
        self,
        kind: Kind,
        resource: Resource,
        reads: tuple[Buffer, ...],
        writes: tuple[Buffer, ...],
        *,
        unit: int = -1,
        wave: int = -1,
        micro_batch: int = -1,
        piece: int = -1,
        size_bytes: int = 0,
        flops: float = 0.0,
        memory_bytes: float = 0.0,
        behind: int = -1,
    ) -> int:
        """Appends an op and returns its position. `behind` is an op that must be issued before it, though nothing of it is
        needed; on `update`, `peers` and `sums` the op before is such a one too."""
        position = len(self.ops)
        after = self._conflicts(position, resource, reads, writes)
        self.ops.append(
            Op(position, kind, resource, unit, wave, micro_batch, piece, size_bytes, flops, memory_bytes, after, reads, writes)
        )
        if behind >= 0:
            self._behind[position] = [behind]
        if resource in ("update", "peers", "sums"):
            if resource in self._last:
                self._behind.setdefault(position, []).append(self._last[resource])
            self._last[resource] = position
        return position

    def _conflicts(
        self, position: int, resource: Resource, reads: tuple[Buffer, ...], writes: tuple[Buffer, ...]
    ) -> tuple[int, ...]:
        accesses, needs = self._accesses, set()
        # A resource that keeps program order is represented by its last reader: the earlier ones are complete by then.
        reader: str | int = resource if resource in _IN_PROGRAM_ORDER else position
        for buffer in reads:
            access = accesses.get(buffer)
            if access is None:
                access = accesses[buffer] = _Access()
            needs.add(access.writer)
            access.readers[reader] = position
        for buffer in writes:
            access = accesses.get(buffer)
            if access is None:
                access = accesses[buffer] = _Access()
            needs.add(access.writer)
            if access.readers:
                needs.update(access.readers.values())
                access.readers.clear()
            access.writer = position
        needs.discard(-1)
        needs.discard(position)
        return tuple(needs)

    def listed(self) -> tuple[Op, ...]:
        """The ops in order of issue, with the fewest `after` edges that hold all dependencies."""
        order = _issue_order(self.ops, self._behind)
        place = [0] * len(order)
        for new, old in enumerate(order):
            place[old] = new
        ops: list[Op] = []
        clocks = Clocks()
        for new, old in enumerate(order):
            d = self.ops[old]
            after = clocks.advance(d.resource, sorted([place[n] for n in d.after], reverse=True))
            ops.append(
                Op(
                    new, d.kind, d.resource, d.unit, d.wave, d.micro_batch, d.piece,
                    d.size_bytes, d.flops, d.memory_bytes, after, d.reads, d.writes,
                )
            )  # fmt: skip
        return tuple(ops)


class Clocks:
    """What is known to be complete when each op of a list starts, as vector clocks: O(ops x resources)."""

    def __init__(self) -> None:
        self.clocks: list[Clock] = []
        """By op, itself included: it is complete, and so is all that it waited for."""
        self._places: list[tuple[int, int]] = []
        self._last: list[Clock] = [(0,) * len(RESOURCES)] * len(RESOURCES)
        self._counts = [0] * len(RESOURCES)

    def advance(self, resource: Resource, after: list[int]) -> tuple[int, ...]:
        """Takes the next op of the list, which waits for the ops `after` (largest first); returns those of them that the
        order on its resource and the others of them do not imply, smallest first."""
        mine = NUMBER[resource]
        clock, needed = self._last[mine], []
        for earlier in after:
            its, count = self._places[earlier]
            if clock[its] < count:
                needed.append(earlier)
                clock = tuple(map(max, clock, self.clocks[earlier]))
        self._counts[mine] += 1
        clock = (*clock[:mine], self._counts[mine], *clock[mine + 1 :])
        self._places.append((mine, self._counts[mine]))
        self.clocks.append(clock)
        self._last[mine] = clock
        needed.reverse()
        return tuple(needed)

    def ordered(self, earlier: int, later: int) -> bool:
        """Whether `earlier` is complete before `later` starts."""
        its, count = self._places[earlier]
        return earlier != later and self.clocks[later][its] >= count


def _issue_order(ops: list[Op], behind: dict[int, list[int]]) -> list[int]:
    """Positions in the program in order of issue: compute and host as programmed, and each other op as soon as all that it
    waits for is issued; of several, the one first in the program, which is the one needed first."""
    waiting = [len(op.after) for op in ops]
    then: list[list[int]] = [[] for _ in ops]
    for op in ops:
        for need in op.after:
            then[need].append(op.id)
    for position, firsts in behind.items():
        waiting[position] += len(firsts)
        for first in firsts:
            then[first].append(position)
    spine = [op.resource in ("compute", "host") for op in ops]
    ready = [p for p, count in enumerate(waiting) if count == 0 and not spine[p]]
    order: list[int] = []

    def issue(position: int) -> None:
        order.append(position)
        for follower in then[position]:
            waiting[follower] -= 1
            if waiting[follower] == 0 and not spine[follower]:
                heapq.heappush(ready, follower)

    for position, fixed in enumerate(spine):
        if fixed:
            while ready:
                issue(heapq.heappop(ready))
            issue(position)
    while ready:
        issue(heapq.heappop(ready))
    return order
