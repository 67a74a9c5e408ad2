"""The learning rate as a pure function of applied updates.

Rejected: scheduler objects that are stepped. They drift from the updates when a step is skipped, count once a worker or once a
micro-batch, and need state in a checkpoint; a function of the update number can do none of that wrong.
"""

from __future__ import annotations

import math

from muletrain.spec.recipe import ScheduleSection


def learning_rate(schedule: ScheduleSection, peak: float, steps: int, update: int) -> float:
    """The rate for the update that follows `update` applied ones (so the first is learning_rate(…, 0)).

    Warm-up rises linearly and reaches the peak at update `warmup_steps`. The decay ends at `final_ratio` x peak on the last of
    `steps` updates; constant stays at the peak; wsd (warm-up, stable, decay) holds the peak, then decays linearly over the last
    `decay_fraction` of the steps. Past the end the last rate holds.
    """
    if update < schedule.warmup_steps:
        return peak * (update + 1) / (schedule.warmup_steps + 1)
    if schedule.kind == "constant":
        return peak
    last = max(steps - 1, schedule.warmup_steps)
    first = schedule.warmup_steps
    if schedule.kind == "wsd":
        first = max(first, steps - max(1, round(schedule.decay_fraction * steps)) - 1)
    progress = 1.0 if last == first else min(1.0, max(0.0, (update - first) / (last - first)))
    falling = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule.kind == "cosine" else 1.0 - progress
    return peak * (schedule.final_ratio + (1.0 - schedule.final_ratio) * falling)
