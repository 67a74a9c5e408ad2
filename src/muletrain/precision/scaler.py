"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018): grow while gradients are finite, halve and skip when not.

The scale is a power of two in units of the mean loss. A strategy sums losses over tokens, so it multiplies the loss by
`factor`, the scale over the power of two nearest to a step's tokens: multiplying and dividing by it never rounds. All workers
see the same global verdict, so their scales stay equal without being communicated.
"""

from __future__ import annotations

import math
from typing import Any


class LossScaler:
    """Scale state of one run. With enabled=False the factor is always 1 and a non-finite value is an error, not a skip."""

    growth_interval = 1000
    smallest, largest = 2.0**-8, 2.0**30

    def __init__(self, enabled: bool, initial: float, tokens_per_step: int) -> None:
        self.enabled = enabled
        self.scale = 2.0 ** round(math.log2(initial)) if enabled else 1.0
        self._good = 0
        self._unit = 2.0 ** round(math.log2(max(1, tokens_per_step))) if enabled else 1.0

    @property
    def factor(self) -> float:
        """What the loss sum is multiplied by before backward."""
        return self.scale / self._unit if self.enabled else 1.0

    def update(self, finite: bool) -> None:
        """Takes the global verdict on one step's gradients."""
        if not self.enabled:
            return
        if not finite:
            self.scale = max(self.smallest, self.scale / 2.0)
            self._good = 0
            return
        self._good += 1
        if self._good >= self.growth_interval:
            self.scale = min(self.largest, self.scale * 2.0)
            self._good = 0

    def state(self) -> dict[str, Any]:
        """JSON-able state."""
        return {"scale": self.scale, "good": self._good}

    def load(self, state: dict[str, Any]) -> None:
        """Takes `state` back; a run without loss scaling ignores one that had it, and the reverse starts afresh."""
        if self.enabled and state.get("scale", 1.0) != 1.0:
            self.scale, self._good = float(state["scale"]), int(state["good"])
