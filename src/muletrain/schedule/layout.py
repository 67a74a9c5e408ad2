"""Which buffers on the card a unit uses: its slot and its gradient buffer, the same in forward and backward and in every step,
so that graphs find their parameters again and nothing is allocated while running."""

from __future__ import annotations

from collections import Counter
from typing import Final

from muletrain.schedule.ops import Buffer, StreamPlan

GRADIENT_BUFFERS: Final = 2
"""A kind of unit: one is filled while the other is stored."""


class Layout:
    """The buffers of each unit of a plan."""

    def __init__(self, plan: StreamPlan) -> None:
        self._plan = plan
        self.slots: list[tuple[Buffer, ...]] = []
        """By unit: the pieces of its slot. Streamed units of a kind take turns, the others have slots behind theirs."""
        self.gradients: list[Buffer] = []
        """By unit."""
        self.sharers: Counter[Buffer] = Counter()
        """Trainable units by gradient buffer."""
        streamed: Counter[int] = Counter()
        own: Counter[int] = Counter()
        summed: Counter[int] = Counter()
        on_card: Counter[int] = Counter()
        for number, unit in enumerate(plan.units):
            kind, place = unit.kind, plan.placed(number)
            if place == "streamed":
                slot = streamed[kind] % plan.slots
                streamed[kind] += 1
            else:
                slot = plan.slots + own[kind]
                own[kind] += 1
            if place == "card":
                gradient = GRADIENT_BUFFERS + on_card[kind]
                on_card[kind] += 1
            else:
                gradient = summed[kind] % GRADIENT_BUFFERS
                summed[kind] += 1
            # A unit without parameters still has a slot, of no bytes, so that its ops are like all others.
            self.slots.append(tuple(Buffer("slot", (kind, slot, p)) for p in range(max(1, len(unit.pieces)))))
            self.gradients.append(Buffer("gradient", (kind, gradient)))
            if unit.trainable:
                self.sharers[self.gradients[-1]] += 1

    def filled(self, pending: bool) -> frozenset[Buffer]:
        """What is there before the step: parameters that stay on the card, and their gradients if updates are pending."""
        filled: set[Buffer] = set()
        for number, unit in enumerate(self._plan.units):
            if self._plan.placed(number) != "streamed":
                filled.update(self.slots[number])
            if self._plan.placed(number) == "card" and unit.trainable and pending:
                filled.add(self.gradients[number])
        return frozenset(filled)

    def slot_elements(self) -> int:
        """Parameters that all slots together hold."""
        largest: dict[tuple[int, ...], int] = {}
        for slot, unit in zip(self.slots, self._plan.units, strict=True):
            key = slot[0].index[:2]
            largest[key] = max(largest.get(key, 0), unit.parameters)
        return sum(largest.values())

    def gradient_elements(self) -> int:
        """Parameters that all gradient buffers together hold."""
        largest: dict[Buffer, int] = {}
        for buffer, unit in zip(self.gradients, self._plan.units, strict=True):
            if unit.trainable:
                largest[buffer] = max(largest.get(buffer, 0), unit.parameters)
        return sum(largest.values())
