"""`mule bench`: measurements of training itself. `scaling`: the same work on several worker counts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

PROFILED_STEPS = 3
"""Steps profiled on several GPUs; they come right after the first three, and none of these counts for speed."""
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure training on this machine.")


@app.callback()
def bench() -> None:
    """Measure training on this machine."""


@app.command()
def scaling(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="RECIPE", help="A recipe; not needed with --runs.", show_default=False)
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to the recipe.", show_default=False)
    ] = None,
    workers: Annotated[str, typer.Option(help="Worker counts, e.g. 1,2,4.")] = "1,2",
    steps: Annotated[
        int, typer.Option(min=1, help="Steps to measure on each count; a few more run first and do not count.")
    ] = 20,
    output: Annotated[
        Path | None, typer.Option(help="Where run folders and scaling.json, scaling.md go. Default: run_dir with -scaling.")
    ] = None,
    runs: Annotated[
        list[Path] | None, typer.Option(help="Make the table from run folders that have ended instead (repeat the option).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Train one recipe on several numbers of workers. Shows speed, memory and communication side by side."""
    from muletrain.bench.scaling import markdown, save_table, table_of
    from muletrain.spec.errors import InputError

    if (recipe is None) == (not runs):
        raise InputError("mule bench scaling: give a recipe to run, or --runs with folders of runs that have ended (not both)")
    if recipe is not None:
        folder, folders, drop = _measure(
            recipe, overrides or [], sorted(set(_numbers("--workers", workers))), steps, output, quiet=json
        )
        table = table_of(folders, drop)
    else:
        folders = runs or []
        table, folder = table_of(folders), output or folders[0]
    paths = save_table(table, folder)
    if json:
        typer.echo(table.to_json(), nl=False)
    else:
        typer.echo("\n" + markdown(table) + f"\nsaved: {paths[0]}, {paths[1]}")


def _measure(
    recipe: Path, overrides: list[str], counts: list[int], steps: int, output: Path | None, *, quiet: bool
) -> tuple[Path, list[Path], int]:
    """(folder, run folders, first steps that do not count)."""
    from muletrain.bench.scaling import DROPPED, measure
    from muletrain.cli.box import box_for
    from muletrain.cli.train import train
    from muletrain.config.load import load_recipe

    request = load_recipe(recipe, overrides)
    folder = output or Path(f"{request.run_dir.rstrip('/')}-scaling")
    on_gpus = bool(box_for(request).gpus)
    profiled = PROFILED_STEPS if on_gpus and max(counts) > 1 else 0
    drop = DROPPED + 1 + profiled if profiled else DROPPED

    def start(count: int, run_dir: Path) -> int:
        if not quiet:
            typer.echo(f"{count} worker{'s' if count > 1 else ''}: {steps + drop} steps")
        own = [*overrides, f"parallel.workers={count}", f"run_dir={run_dir}", "log.console=quiet", "log.every=1"]
        return train(load_recipe(recipe, own), stop_after=steps + drop, profile_steps=profiled, measure_only=True)

    return folder, measure(start, counts, folder), drop


@app.command()
def simulate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A catalogue name, e.g. deepseek-llm-7b.", show_default=False)],
    gpu: Annotated[str, typer.Option(help="The card, by its catalogue name.")] = "RTX 4090",
    cards: Annotated[str, typer.Option(help="Numbers of cards, e.g. 1,3.")] = "1",
    tokens: Annotated[str, typer.Option(help="Tokens a step over all cards, e.g. 8192,65536.")] = "8192,16384,65536",
    sequence: Annotated[int, typer.Option(min=1, help="Tokens in a row.")] = 4096,
    moments: Annotated[str, typer.Option(help="Formats of optimizer moments: fp32, bf16, 8bit.")] = "bf16",
    clip: Annotated[bool, typer.Option(help="Clip by the global norm, so that updates wait for the next step.")] = True,
    ram: Annotated[str, typer.Option(help="Host memory.")] = "128GiB",
    product: Annotated[float, typer.Option(help="TFLOP/s of large products; 0: the catalogue's.")] = 0.0,
    link: Annotated[float, typer.Option(help="GB/s from host to card and back, each way; 0: the catalogue's.")] = 0.0,
    host_bandwidth: Annotated[float, typer.Option(help="GB/s that host memory moves over all links; 0: no limit.")] = 0.0,
    reference: Annotated[float, typer.Option(help="Published tokens/s of one card to compare with.")] = 0.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Simulate full-parameter streamed training on cards that are not at hand. Nothing is run."""
    from muletrain.bench.streaming import SimulatedTable, cards_of, markdown, points
    from muletrain.catalog.families import model_shape
    from muletrain.catalog.models import model_config
    from muletrain.spec.units import parse_bytes

    shape = model_shape(model_config(model), model)
    box = cards_of(gpu, parse_bytes(ram), product * 1e12, link * 1e9, host_bandwidth * 1e9)
    steps, counts = _numbers("--tokens", tokens), _numbers("--cards", cards)
    found = points(shape, box, steps, counts, _moments(moments), sequence, clip)
    table = SimulatedTable(model=model, gpu=gpu, sequence=sequence, rates=box.speed.source, points=tuple(found))
    typer.echo(table.to_json() if json else markdown(table, reference), nl=False)


def _numbers(option: str, text: str) -> list[int]:
    from muletrain.spec.errors import InputError

    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise InputError(f"{option}: {text!r} is no list of whole numbers; write it like 1,3")
    return [int(word) for word in words]


def _moments(text: str) -> list[Any]:
    from typing import get_args

    from muletrain.spec.errors import InputError
    from muletrain.spec.recipe import OptimizerState

    words = [word.strip() for word in text.split(",")]
    unknown = [word for word in words if word not in get_args(OptimizerState)]
    if unknown:
        raise InputError(f"--moments: {unknown[0]!r} is not one of {', '.join(get_args(OptimizerState))}")
    return words


@app.command()
def planner(
    points: Annotated[Path, typer.Argument(metavar="CSV", help="Published measurements, one a row.", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Score the planner against published measurements. Each source is judged by constants that have not seen it."""
    from muletrain.bench.planner import markdown, score
    from muletrain.bench.points import read_points

    found = score(read_points(points))
    typer.echo(found.to_json() if json else markdown(found), nl=False)


@app.command()
def claims(
    output: Annotated[Path | None, typer.Option(help="Write the page here instead of printing it.")] = None,
) -> None:
    """What is claimed of RTX 4090 boxes beside what plans say, as a page. Nothing is measured."""
    from muletrain.bench.claims import claims_page

    if output is None:
        typer.echo(claims_page(), nl=False)
    else:
        output.write_text(claims_page(), encoding="utf-8")
        typer.echo(f"saved: {output}")
