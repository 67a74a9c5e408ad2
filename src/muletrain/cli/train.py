"""`mule train`: recipe -> plan -> data -> workers. Everything that can be wrong is found before a model is loaded.

The order is the point: plan and folder checks take a second; data preparation comes before any process group exists, so nobody
waits in a collective for it; torch is imported once, here, and the workers are forked from this process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from muletrain.data.dataset import Prepared
    from muletrain.spec.machine import Machine
    from muletrain.spec.place import WorkerPlace
    from muletrain.spec.plan import Plan
    from muletrain.spec.recipe import RunConfig


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, e.g. recipes/demo.yaml.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes, e.g. train.optimizer.learning_rate=1e-5.", show_default=False),
    ] = None,
    stop_after: Annotated[
        int, typer.Option(min=0, help="Save and stop after this many updates, as a signal would; 0: train to the end.")
    ] = 0,
    profile_steps: Annotated[
        int, typer.Option(min=0, help="On several GPUs: steps to profile for the communication share (mule bench does this).")
    ] = 0,
) -> None:
    """Train a model as a recipe says; the same command continues a run that stopped."""
    from muletrain.config.environment import torchrun_place
    from muletrain.config.load import load_recipe
    from muletrain.launch.run_folder import locked, prepare_run_folder, write_inputs

    place = torchrun_place()
    request = load_recipe(recipe, overrides or ())
    plan, machine = _decide(request, place)
    folder = Path(plan.run_dir)
    if place is not None and place.rank != 0:
        raise typer.Exit(_run(plan, place, stop_after, profile_steps, quiet=True))
    prepare_run_folder(folder, plan.checkpoint.resume)
    with locked(folder):
        write_inputs(folder, request, machine, plan)
        raise typer.Exit(_run(plan, place, stop_after, profile_steps, quiet=plan.log.console == "quiet"))


def _decide(request: RunConfig, place: WorkerPlace | None) -> tuple[Plan, Machine]:
    from muletrain.config.environment import visible_devices
    from muletrain.planner.resolve import resolve
    from muletrain.probe.box import this_box
    from muletrain.spec.errors import InputError

    if place is not None:
        asked = request.parallel.workers
        if asked not in ("auto", place.workers):
            raise InputError(
                f"parallel.workers: {asked}, but torchrun started {place.workers}; give torchrun --nproc-per-node {asked}, "
                "or leave parallel.workers out"
            )
        request = request.model_copy(update={"parallel": request.parallel.model_copy(update={"workers": place.workers})})
    machine = this_box(visible_devices())
    plan = resolve(request, machine, interactive=sys.stdout.isatty())
    return _with_peak(plan, machine), machine


def _with_peak(plan: Plan, machine: Machine) -> Plan:
    """The slowest used card's dense peak, if the catalogue knows all of them."""
    from muletrain.catalog.gpus import gpu_peak

    if plan.parallel.device != "cuda":
        return plan
    peaks = [gpu_peak(gpu.name, plan.precision.compute) for gpu in machine.gpus[: plan.parallel.workers]]
    known = [peak for peak in peaks if peak]
    peak = min(known) if known and len(known) == len(peaks) else 0.0
    return plan.model_copy(update={"parallel": plan.parallel.model_copy(update={"peak_flops": peak})})


def _run(plan: Plan, place: WorkerPlace | None, stop_after: int, profile_steps: int, *, quiet: bool) -> int:
    """Data, then workers; the exit code."""
    from muletrain.launch.run_folder import space_warning

    if not quiet:
        _show(plan)
    warning = space_warning(Path(plan.run_dir), plan)
    if warning:
        typer.echo(f"warning: {warning}", err=True)
    data = _prepare(plan, quiet=quiet)

    from muletrain.launch import local
    from muletrain.train.build import Session
    from muletrain.train.worker import run_worker

    session = Session(data.folder, stop_after, profile_steps)
    if place is not None:
        return run_worker(plan, place, session)
    return local.run(lambda own: run_worker(plan, own, session), plan.parallel.workers)


def _show(plan: Plan) -> None:
    """The plan in a few lines, and why."""
    from muletrain.spec.units import format_bytes, format_count

    shape, ledger = plan.model.shape, plan.memory.ledger
    where = "card" if plan.parallel.device == "cuda" else "host"
    typer.echo(
        f"plan: {shape.name}, {format_count(shape.parameters)} parameters, {plan.memory.strategy} on {plan.parallel.workers} "
        f"{plan.parallel.device} worker{'s' if plan.parallel.workers > 1 else ''}, {plan.precision.compute}, "
        f"{format_count(plan.tokens_per_step)} tokens a step, about {format_bytes(ledger.total(where))} of {where} memory"
    )
    for reason in plan.reasons:
        typer.echo(f"  {reason}")


def _prepare(plan: Plan, *, quiet: bool) -> Prepared:
    """The data set, made or found, and what it holds."""
    from muletrain.data.prepare import prepare
    from muletrain.data.report import report_lines

    prepared = prepare(plan.data)
    if not quiet:
        for line in report_lines(prepared):
            typer.echo(line)
    return prepared
