"""How much of what backward needs goes to the host instead of being computed again, on one card whose speed is known.

Sends fit beside forward as far as updates leave the link free, receives fit beside backward. So that they are spread evenly
over both, every block sends one micro-batch of so many: a block that sent all of its own would wait for the link, while the
link waits during others (simulated, at 65k tokens a step on an RTX 4090: a loss instead of a gain). The step is simulated
for each such share, with as many whole blocks on the card as its buffers leave room for, and the fastest is taken if it gains
more than WORTH.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from muletrain.planner.footprint import Footprint
from muletrain.planner.prediction import streamed_timeline
from muletrain.planner.speed import Speed
from muletrain.spec.ledger import Ledger
from muletrain.spec.model_shape import ModelShape

WORTH: Final = 0.02
"""Of a step: what an offloading plan must gain."""
_SHARES: Final = (16, 12, 10, 8, 7, 6, 5, 4, 3, 2, 1)
_MOST: Final = 20_000
"""Block calls of a step up to which it is simulated: beyond, a plan would take longer than a person waits."""

Fitting = Callable[[Footprint], tuple[Footprint, Ledger] | None]
"""The best layout that fits, with its memory."""


def offloading(shape: ModelShape, chosen: Footprint, fitting: Fitting, speed: Speed) -> tuple[Footprint, Ledger, float] | None:
    """(layout, memory, share of the step gained) with the best share of micro-batches sent, or None if `chosen`, which offloads
    nothing, is as good."""
    if chosen.rounds * shape.layers > _MOST:
        return None
    plain = streamed_timeline(shape, chosen, speed).line.step_s
    best: tuple[Footprint, Ledger, float] | None = None
    for every in (share for share in _SHARES if share <= chosen.rounds):
        changes = {"activations": ("offload",) * shape.layers, "offload_every": every}
        found = fitting(replace(chosen, streaming=chosen.streaming.model_copy(update=changes)))
        if found is None:
            break  # more takes more memory
        gained = 1 - streamed_timeline(shape, found[0], speed).line.step_s / plain
        if gained > (best[2] if best else WORTH):
            best = (*found, gained)
        elif best:
            break  # past the best
    return best
