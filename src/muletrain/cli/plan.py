"""`mule plan`: what can be trained on which cards, how fast, for how much money and power, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from muletrain.planner.answer import PlanAnswer, WayRow
    from muletrain.planner.fleet import Fleet
    from muletrain.planner.ways import Method, Work

BAR = 30


def command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|RECIPE.yaml", help="A catalogue name, hub name, folder, config.json, or a recipe.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to a recipe.", show_default=False)
    ] = None,
    on: Annotated[
        str | None, typer.Option(help="Cards, e.g. '3x RTX 4090' or '2x RTX 4090 + RTX 3090@x4:22GiB', or a machine.json.")
    ] = None,
    ram: Annotated[str | None, typer.Option(help="Host memory of one box, e.g. 128GiB.")] = None,
    boxes: Annotated[int, typer.Option(min=1, help="How many such boxes.")] = 1,
    network: Annotated[str | None, typer.Option(help="What joins boxes, of one box one way, e.g. 100Gb/s.")] = None,
    tokens: Annotated[str, typer.Option(help="Tokens to train on, e.g. 1T.")] = "1B",
    tokens_per_step: Annotated[str, typer.Option(help="Of one update, over all cards, e.g. 393k.")] = "65536",
    seq: Annotated[str, typer.Option(help="Tokens in a row, e.g. 4096 or 4k.")] = "4096",
    method: Annotated[str, typer.Option(help="full, lora or qlora.")] = "full",
    rank: Annotated[int, typer.Option(min=1, help="Of adapters.")] = 16,
    precision: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    rent: Annotated[str | None, typer.Option(help="e.g. 2.3CNY/h (a card), 8600CNY/month/box.")] = None,
    power: Annotated[str | None, typer.Option(help="Price of electricity, e.g. 0.8CNY/kWh.")] = None,
    buy: Annotated[str | None, typer.Option(help="Price of one card, e.g. 15000CNY.")] = None,
    scale: Annotated[bool, typer.Option("--scale", help="Double the box up to 4,096 cards, on paper; with --network.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with a picture of the trade-offs here, too.")] = None,
) -> None:
    """Plan before the run: does it fit, how fast, how many hours, how much money and power, and what else there is."""
    from muletrain.spec.errors import DoesNotFitError

    if model.endswith((".yaml", ".yml")):
        _recipe(Path(model), overrides or [], on, ram, as_json=as_json)
        return
    if scale:
        fleet = _fleet(on, ram, max(2, boxes), network)  # the network is kept for the rows with more than one box
        _scale(_work(model, tokens, tokens_per_step, seq, method, rank, precision), fleet, as_json=as_json)
        return
    found = _answer(
        model, _fleet(on, ram, boxes, network), tokens, tokens_per_step, seq, method, rank, precision, (rent, power, buy)
    )
    typer.echo(found.to_json() if as_json else text_of(found), nl=False)
    if html is not None:
        from muletrain.planner.page import page

        html.write_text(page(found), encoding="utf-8")
    if found.choice is None:
        raise typer.Exit(DoesNotFitError.exit_code)


def _answer(
    model: str,
    fleet: Fleet,
    tokens: str,
    tokens_per_step: str,
    seq: str,
    method: str,
    rank: int,
    precision: str,
    prices: tuple[str | None, str | None, str | None],
) -> PlanAnswer:
    from muletrain.planner.answer import answer
    from muletrain.planner.assumptions import Assumptions
    from muletrain.planner.money import parse_prices

    work = _work(model, tokens, tokens_per_step, seq, method, rank, precision)
    return answer(work, fleet, parse_prices(*prices), Assumptions())


def _scale(work: Work, fleet: Fleet, *, as_json: bool) -> None:
    from muletrain.planner.assumptions import Assumptions
    from muletrain.planner.scale import scale

    found = scale(work, fleet, Assumptions())
    if as_json:
        typer.echo(found.to_json(), nl=False)
        return
    lines = [f"  {'cards':>6} {'tokens/s':>12} {'a card':>7} {'waits':>6} {'gain':>6}  way (on paper)"]
    for row in found.rows:
        way = row.way if row.fits else f"does not fit: {row.way}"
        lines.append(
            f"  {row.cards:>6,} {row.tokens_per_s:>12,.0f} {row.efficiency:>7.0%} {row.communication:>6.0%} {row.gain:>6.0%}"
            f"  {way}"
        )
    last = found.rows[-1].cards
    lines.append(
        f"more than {found.worth_up_to:,} cards are not worth it: doubling them adds less than half of what it costs"
        if found.worth_up_to
        else f"every doubling up to {last:,} cards adds more than half of what it costs"
    )
    typer.echo("\n".join(lines))


def _work(model: str, tokens: str, tokens_per_step: str, seq: str, method: str, rank: int, precision: str) -> Work:
    """All that is wrong with the options is told at once, then all that is wrong with them for the model."""
    from muletrain.planner.source import read_shape
    from muletrain.planner.ways import Work
    from muletrain.spec.errors import InputError
    from muletrain.spec.units import parse_count, parse_length

    problems, counts = [], []
    for option, text, parse in (
        ("--tokens", tokens, parse_count),
        ("--tokens-per-step", tokens_per_step, parse_count),
        ("--seq", seq, parse_length),
    ):
        try:
            counts.append(max(1, parse(text)))
        except ValueError as error:
            problems.append(f"{option}: {error}")
    methods: dict[str, Method] = {"full": "full", "lora": "lora", "qlora": "qlora"}
    formats: dict[str, Literal["bf16", "fp16"]] = {"bf16": "bf16", "fp16": "fp16"}
    if method not in methods:
        problems.append(f"--method: {method!r} is none of {', '.join(methods)}")
    if precision not in formats:
        problems.append(f"--precision: {precision!r} is neither bf16 nor fp16")
    if problems:
        raise InputError(*problems)
    shape = read_shape(model)
    if counts[2] > shape.max_positions:
        problems.append(f"--seq: {counts[2]} is longer than the {shape.max_positions} positions that {shape.name} was made for")
    if method != "full" and not shape.linears:
        problems.append(f"--method: {method}: {shape.family} has no linear layers that adapters are known for")
    if problems:
        raise InputError(*problems)
    return Work(shape, counts[2], counts[0], counts[1], methods[method], rank, formats[precision])


def _fleet(on: str | None, ram: str | None, boxes: int, network: str | None) -> Fleet:
    """What is planned for: cards by name, a measured machine, or this box."""
    from muletrain.config.environment import visible_devices
    from muletrain.config.machine import load_machine
    from muletrain.planner.fleet import machine_fleet, parse_fleet
    from muletrain.probe.box import this_box

    if on is None:
        return machine_fleet(this_box(visible_devices()), ram)
    if on.endswith(".json"):
        return machine_fleet(load_machine(Path(on)), ram)
    return parse_fleet(on, ram, boxes, network)


def _recipe(file: Path, overrides: list[str], on: str | None, ram: str | None, *, as_json: bool) -> None:
    """A recipe, decided for this box or for another."""
    import sys

    from muletrain.cli.box import box_for
    from muletrain.cli.config import plan_text
    from muletrain.config.load import load_recipe
    from muletrain.planner.resolve import resolve

    request = load_recipe(file, overrides)
    machine = _fleet(on, ram, 1, None).machine if on else box_for(request)
    plan = resolve(request, machine, interactive=sys.stdout.isatty())
    typer.echo(plan.to_json() if as_json else plan_text(plan), nl=False)


def text_of(found: PlanAnswer) -> str:
    """What a person reads in ten seconds, then the ranked alternatives."""
    from muletrain.spec.units import format_bytes, format_count

    active = f", {format_count(found.active_parameters)} active" if found.active_parameters < found.parameters else ""
    lines = [
        f"{found.model}: {format_count(found.parameters)} parameters{active}, {found.method}, on {found.box}; "
        f"{format_count(found.tokens)} tokens, {format_count(found.tokens_per_step)} a step, rows of {found.sequence}",
        "",
    ]
    if found.choice is None:
        lines += ["does not fit", f"  {found.binding}"]
    else:
        lines += _chosen(found, found.choice)
    lines += ["", f"  {'way':59} {'fits':>12} {'tokens/s':>9} {'hours':>9} {'kWh':>9} {'cost':>14}"]
    for row in found.ways[:14]:
        spare = min([row.card_spare_bytes, *([row.host_spare_bytes] if found.host_memory_bytes else [])])
        fits = f"{format_bytes(abs(spare))} {'free' if spare >= 0 else 'short'}"
        hours, kwh = sum(row.hours) / 2, sum(row.kwh) / 2
        name = row.name[:57] + (" *" if row.paper else "")
        lines.append(
            f"  {name:59} {fits:>12} {row.tokens_per_s:>9,.0f} {hours:>9,.0f} {kwh:>9,.0f} {_money(row, short=True):>14}"
        )
    if any(row.paper for row in found.ways[:14]):
        lines.append("  * on paper only: this version does not run it")
    return "\n".join(lines) + "\n"


def _chosen(found: PlanAnswer, row: WayRow) -> list[str]:
    from muletrain.spec.units import format_bytes, format_duration

    low, high = row.hours
    fits = f"{format_bytes(row.card_spare_bytes)} free on each card"
    if found.host_memory_bytes:
        fits += f", {format_bytes(row.host_spare_bytes)} on the host"
    speed_low, speed_high = row.tokens_per_s_range
    lines = [
        f"fits: {row.name}, micro-batch {row.micro_batch}; {fits}",
        f"  speed   {row.tokens_per_s:,.0f} tokens/s ({speed_low:,.0f} to {speed_high:,.0f}), "
        f"{row.communication:.0%} of a step waits for other cards or the host",
        f"  time    {format_duration(low * 3600)} to {format_duration(high * 3600)}",
        f"  money   {_money(row)}; {row.cost.note}",
        f"  power   {row.watts:,.0f} W, {row.kwh[0]:,.0f} to {row.kwh[1]:,.0f} kWh",
        f"  card    {_bar(row.card_parts, found.card_memory_bytes)}",
        f"  host    {_bar(row.host_parts, found.host_memory_bytes)}",
        f"  bound   {found.binding}",
        f"  next    {found.runner_up}",
        f"  hangs on {found.sensitive_to}",
    ]
    lines += [f"  mixed   {note}" for note in row.notes]
    if row.keys:
        lines.append("  recipe  " + " ".join(f"{key}={value}" for key, value in row.keys.items()))
    return lines


def _bar(parts: dict[str, int], there: int) -> str:
    """Memory in use, of what is there, and its largest parts."""
    from muletrain.spec.units import format_bytes

    used = sum(parts.values())
    largest = sorted(parts.items(), key=lambda part: -part[1])[:4]
    text = ", ".join(f"{part} {format_bytes(size)}" for part, size in largest)
    if not there:
        return f"{format_bytes(used)} ({text})"
    full = min(BAR, round(BAR * used / there))
    return f"[{'#' * full}{'.' * (BAR - full)}] {format_bytes(used)} of {format_bytes(there)} ({text})"


def _money(row: WayRow, *, short: bool = False) -> str:
    cost = row.cost
    low, high = cost.total
    if not cost.currency or not high:
        return "" if short else "no price given"
    if short:
        return f"{(low + high) / 2:,.0f} {cost.currency}"
    text = f"{low:,.0f} to {high:,.0f} {cost.currency}"
    if cost.rent[1] and cost.power[1]:
        text += f" rent, or {cost.power[0]:,.0f} to {cost.power[1]:,.0f} {cost.currency} of electricity with own cards"
    if cost.buy:
        text += f"; cards cost {cost.buy:,.0f} {cost.currency}"
        if cost.buy_pays_after_h:
            text += f", paid back after {cost.buy_pays_after_h:,.0f} hours of use"
    return text
