"""Continuing a run: where it goes on, and what every difference to the saved plan means.

The position counts windows; where a window's size changed it is carried over by rows, rounded down, so that no row is left out.
Rejected: refusing any change (a resume on other hardware is the point), and taking changes in silence.
"""

from __future__ import annotations

from typing import Any

from muletrain.checkpoint.progress import Progress, plan_summary
from muletrain.spec.plan import Plan

_RULES = {
    "parallel.": "the same updates, to the rounding of the number format",
    "memory.": "the same updates, to the rounding of the number format",
    "precision.compute": "applies from here on; the saved master weights are converted if the format of the master changes",
    "train.optimizer.": "applies from here on; the moments are kept",
    "train.schedule.": "the rate is the new schedule's at this update, so it may jump",
    "train.steps": "the schedule is that of the new length at this update, so the rate may jump",
    "train.epochs": "the end moves; passes already made count",
    "train.clip_norm": "applies from here on",
    "train.seed": "the order of rows changes in the middle of an epoch: some rows come twice in it, some not at all",
    "model.adapter.base": "the frozen weights may be others than those that the adapter was trained beside so far",
    "model.adapter.": "the matrices fit, so it is taken from here on",
    "model.config": "the weights fit, so it is taken",
}
_BY_POSITION = ("data.sequence_length", "data.packing", "train.micro_batch", "train.micro_batches")


def carry_over(saved: Progress, plan: Plan, windows_per_epoch: int, data_fingerprint: str) -> tuple[Progress, list[str]]:
    """(where to go on, one sentence for each difference with its rule)."""
    notes = []
    summary = plan_summary(plan)
    for key, new in summary.items():
        old = saved.summary.get(key)
        if old != new and key not in _BY_POSITION:
            notes.append(f"{key} was {_short(old)}, is now {_short(new)}: {_rule(key)}")
    window, position_note = _position(saved, plan, windows_per_epoch, data_fingerprint, summary)
    if position_note:
        notes.append(position_note)
    changes = {
        "window": window,
        "windows_per_epoch": windows_per_epoch,
        "rows_per_window": plan.train.micro_batches * plan.train.micro_batch,
        "data_fingerprint": data_fingerprint,
        "seed": plan.train.seed,
        "summary": summary,
    }
    return saved.model_copy(update=changes), notes


def _rule(key: str) -> str:
    return next(rule for prefix, rule in _RULES.items() if key.startswith(prefix))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _position(
    saved: Progress, plan: Plan, windows_per_epoch: int, fingerprint: str, summary: dict[str, Any]
) -> tuple[int, str]:
    rows_changed = [key for key in ("data.sequence_length", "data.packing") if saved.summary.get(key) != summary[key]]
    if fingerprint != saved.data_fingerprint or rows_changed:
        what = ", ".join(rows_changed) or "the data"
        return 0, f"{what} changed: the rows are others, so reading starts at their beginning; {saved.update} updates count"
    rows_per_window = plan.train.micro_batches * plan.train.micro_batch
    if rows_per_window == saved.rows_per_window:
        return saved.window, ""
    epoch, within = divmod(saved.window, saved.windows_per_epoch)
    rows = within * saved.rows_per_window
    window = epoch * windows_per_epoch + rows // rows_per_window
    again = rows % rows_per_window
    return window, (
        f"an update has {rows_per_window} rows, before {saved.rows_per_window}: reading goes on at row {rows - again} of epoch "
        f"{epoch}" + (f", so {again} rows come twice in it" if again else ", where it stopped")
    )
