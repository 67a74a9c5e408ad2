"""A plan as one HTML file: the table of ways, and a picture of speed against memory on a card, the best trade-offs joined.

A way is on the line if no other that fits is both faster and takes less of each card. No script and nothing from elsewhere.
"""

from __future__ import annotations

from html import escape

from muletrain.planner.answer import PlanAnswer, WayRow

WIDTH, HEIGHT, EDGE = 760, 380, 60
GIB = 2**30
_STYLE = (
    "body{font:15px sans-serif;margin:2em;max-width:60em}table{border-collapse:collapse}"
    "td,th{padding:.2em .7em;text-align:right}"
    "td:first-child,th:first-child{text-align:left}tr.no{color:#999}"
)


def pareto(rows: tuple[WayRow, ...]) -> tuple[WayRow, ...]:
    """Of ways that fit, those that none beats in both speed and memory on a card, the fastest first."""
    best: list[WayRow] = []
    for row in sorted((row for row in rows if row.fits), key=lambda row: (-row.tokens_per_s, row.card_bytes)):
        if not best or row.card_bytes < best[-1].card_bytes:
            best.append(row)
    return tuple(best)


def page(found: PlanAnswer) -> str:
    """The whole file."""
    title = escape(f"{found.model} on {found.box}")
    chosen = escape(found.choice.name) if found.choice else "nothing fits"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>'
        f"<p>Choice: {chosen}.</p><p>Bound by {escape(found.binding)}.</p>{picture(found)}{_table(found)}</html>\n"
    )


def picture(found: PlanAnswer) -> str:
    """Speed to the right, memory on a card upwards; hollow: on paper only."""
    rows = [row for row in found.ways if row.fits]
    if not rows:
        return "<p>No way fits, so there is nothing to draw.</p>"
    fastest = max(row.tokens_per_s for row in rows)

    def place(row: WayRow) -> tuple[float, float]:
        x = EDGE + (WIDTH - 2 * EDGE) * row.tokens_per_s / fastest
        return x, HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * row.card_bytes / found.card_memory_bytes

    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, pareto(found.ways)))
    dots = "".join(
        f'<circle cx="{place(row)[0]:.1f}" cy="{place(row)[1]:.1f}" r="5" stroke="#246" '
        f'fill="{"none" if row.paper else "#246"}"><title>{escape(row.name)}</title></circle>'
        for row in rows
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="speed against memory">'
        f'<path d="M{EDGE} {EDGE}V{HEIGHT - EDGE}H{WIDTH - EDGE}" fill="none" stroke="#888"/>'
        f'<polyline points="{line}" fill="none" stroke="#c60"/>{dots}'
        f'<text x="{WIDTH - EDGE}" y="{HEIGHT - 20}" text-anchor="end">up to {fastest:,.0f} tokens/s</text>'
        f'<text x="{EDGE}" y="{EDGE - 15}">of {found.card_memory_bytes / GIB:.1f} GiB a card</text></svg>'
    )


def _table(found: PlanAnswer) -> str:
    head = "".join(f"<th>{text}</th>" for text in ("way", "fits", "tokens/s", "hours", "kWh", "cost"))
    body = ""
    for row in found.ways:
        low, high = row.cost.total
        cost = f"{low:,.0f} to {high:,.0f} {escape(row.cost.currency)}" if high else "no price given"
        cells = (
            escape(row.name) + (" (paper only)" if row.paper else ""),
            "yes" if row.fits else "no",
            f"{row.tokens_per_s:,.0f}",
            f"{row.hours[0]:,.0f} to {row.hours[1]:,.0f}",
            f"{row.kwh[0]:,.0f} to {row.kwh[1]:,.0f}",
            cost,
        )
        body += f'<tr class="{"yes" if row.fits else "no"}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    return f"<table><tr>{head}</tr>{body}</table>"
