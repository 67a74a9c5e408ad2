"""Ledger: memory as line items, so that a plan and a measurement can be laid side by side part by part."""

from __future__ import annotations

from typing import Literal

from muletrain.spec.value import Value

Place = Literal["card", "host"]


class LedgerItem(Value):
    """One part of one worker's memory (card) or of the box's (host)."""

    part: str
    """parameters, gradients, master, moments, activations, logits, slots, staging, state, inputs, workspace, context."""
    place: Place
    size_bytes: int
    formula: str
    """How it was computed, for a person."""


class Ledger(Value):
    """All parts. Card items are per worker, host items are for the whole box."""

    items: tuple[LedgerItem, ...]

    def total(self, place: Place) -> int:
        """Bytes in one place."""
        return sum(item.size_bytes for item in self.items if item.place == place)
