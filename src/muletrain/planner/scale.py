"""The same step on 8 to 4,096 cards, on paper: how speed grows, and from where another box is not worth it.

The tokens of a step are fixed, as they are for a recipe, so each card's share shrinks while what is exchanged does not. On each
number of boxes the fastest way that fits is taken: state sharded over all cards, or over those of a box with gradients summed
between boxes. Doubling is called not worth it where it adds less than half of what it costs. What streams is left out.
"""

from __future__ import annotations

from dataclasses import replace

from muletrain.planner.assumptions import Assumptions
from muletrain.planner.estimate import Estimate, choose, estimate
from muletrain.planner.fleet import Fleet
from muletrain.planner.ways import Way, Work, ways
from muletrain.spec.value import Value

WORTH = 0.5
"""Of the doubled cards: the least gain in speed that is worth them."""


class ScaleRow(Value):
    """One number of boxes."""

    cards: int
    way: str
    fits: bool
    tokens_per_s: float
    efficiency: float
    """Speed over that of the first row, a card."""
    communication: float
    gain: float
    """Speed over that of the row before, less one; 0 in the first."""


class Scale(Value):
    """All rows, and the last number of cards whose doubling was worth it; 0: all were."""

    rows: tuple[ScaleRow, ...]
    worth_up_to: int


def scale(work: Work, fleet: Fleet, assumed: Assumptions, most: int = 4096) -> Scale:
    """Doubles the boxes of `fleet` until there are `most` cards, or fewer rows in a step than cards."""
    rows: list[ScaleRow] = []
    worth, boxes = 0, 1
    while boxes * len(fleet.cards) <= most and (not rows or boxes * len(fleet.cards) <= work.sequences):
        found = _fastest(work, replace(fleet, boxes=boxes), assumed)
        cards = boxes * len(fleet.cards)
        first, before = (rows[0], rows[-1]) if rows else (None, None)
        gain = found.tokens_per_s / before.tokens_per_s - 1 if before else 0.0
        efficiency = found.tokens_per_s / cards / (first.tokens_per_s / first.cards) if first else 1.0
        if before and gain < WORTH and not worth:
            worth = before.cards
        rows.append(
            ScaleRow(
                cards=cards,
                way=found.way.name,
                fits=found.fits,
                tokens_per_s=found.tokens_per_s,
                efficiency=efficiency,
                communication=found.communication,
                gain=gain,
            )
        )
        boxes *= 2
    return Scale(rows=tuple(rows), worth_up_to=worth)


def _fastest(work: Work, fleet: Fleet, assumed: Assumptions) -> Estimate:
    """Of ways on all cards that fit, else the one that is least short."""
    found = []
    for group in ways(work, fleet, assumed):
        job = group[0].job
        if group[0].cards < len(fleet.cards) or group[0].strategy == "streamed" or job.offload or job.matmul == "fp8":
            continue  # what streams is one box's, and formats stay the same from row to row
        for variant in (group, _inside_boxes(group)):
            if variant:
                found.append(estimate(choose(variant, fleet, assumed), fleet, work, assumed))
    return max(found, key=lambda each: (each.fits, each.tokens_per_s if each.fits else each.card_spare))


def _inside_boxes(group: list[Way]) -> list[Way]:
    """With state sharded inside each box, gradients summed between them."""
    if group[0].boxes == 1 or group[0].job.shard == "none":
        return []
    return [
        replace(way, name=f"{way.name}, sharded inside boxes", run=None, job=replace(way.job, shard_over=way.cards))
        for way in group
    ]
