"""`mule train`: recipe -> plan -> data -> workers. Everything that can be wrong is found before a model is loaded.

The order is the point: plan and folder checks take a second; data preparation comes before any process group exists, so nobody
waits in a collective for it; torch is imported once, here, and the workers are forked from this process.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from muletrain.data.dataset import Prepared
    from muletrain.spec.ledger import Place
    from muletrain.spec.machine import Machine
    from muletrain.spec.place import WorkerPlace
    from muletrain.spec.plan import Plan
    from muletrain.spec.recipe import RunConfig


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, e.g. recipes/demo.yaml.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes, e.g. train.optimizer.learning_rate=1e-5.", show_default=False),
    ] = None,
    stop_after: Annotated[
        int, typer.Option(min=0, help="Save and stop after this many updates, as a signal would; 0: train to the end.")
    ] = 0,
    profile_steps: Annotated[
        int, typer.Option(min=0, help="On several GPUs: steps to profile for the communication share (mule bench does this).")
    ] = 0,
) -> None:
    """Train a model as a recipe says. The same command continues a run that stopped."""
    from muletrain.cli.pipe import enduring_output
    from muletrain.config.load import load_recipe

    request = load_recipe(recipe, overrides or ())
    with enduring_output():
        code = train(request, stop_after=stop_after, profile_steps=profile_steps)
    raise typer.Exit(code)


def train(request: RunConfig, *, stop_after: int = 0, profile_steps: int = 0, measure_only: bool = False) -> int:
    """A whole session; its exit code. `measure_only`: neither evaluates nor saves. Raises MuleError."""
    from muletrain.config.environment import expand_segments, limit_spinning, torchrun_place
    from muletrain.launch.run_folder import locked, prepare_run_folder, space_warning, write_inputs

    limit_spinning()
    expand_segments()
    place = torchrun_place()
    with _stoppable("fetching the model"):
        _fetch(request)
    plan, machine = _decide(request, place)
    options = {"stop_after": stop_after, "profile_steps": profile_steps, "measure_only": measure_only}
    folder = Path(plan.run_dir)
    if place is not None and place.rank != 0:  # the folder is worker 0's to check, and may not be there yet
        return _run(plan, place, options, quiet=True)
    prepare_run_folder(folder, plan.checkpoint.resume)
    with locked(folder):
        write_inputs(folder, request, machine, plan)
        warning = None if measure_only else space_warning(folder, plan)
        if warning:
            typer.echo(f"warning: {warning}", err=True)
        return _run(plan, place, options, quiet=plan.log.console == "quiet")


def _decide(request: RunConfig, place: WorkerPlace | None) -> tuple[Plan, Machine]:
    from muletrain.cli.box import box_for
    from muletrain.planner.prediction import with_expectation
    from muletrain.planner.resolve import resolve
    from muletrain.spec.errors import InputError

    if place is not None:
        asked = request.parallel.workers
        if asked not in ("auto", place.workers):
            raise InputError(
                f"parallel.workers: {asked}, but torchrun started {place.workers}; give torchrun --nproc-per-node {asked}, "
                "or leave parallel.workers out"
            )
        request = request.model_copy(update={"parallel": request.parallel.model_copy(update={"workers": place.workers})})
    machine = box_for(request)
    plan = with_expectation(resolve(request, machine, interactive=sys.stdout.isatty()), machine)
    if plan.parallel.device == "cuda":  # otherwise torch, slow to import, can wait
        from muletrain.train.device import check_gpu_build

        check_gpu_build(machine.gpus)
    return plan, machine


def _fetch(request: RunConfig) -> None:
    """Model and tokenizer that are hub names, unless they are here already."""
    from muletrain.catalog import hub
    from muletrain.catalog.models import model_names, model_tokenizer

    source, tokenizer = request.model.source, request.data.tokenizer
    named = source not in model_names() and hub.is_name(source) and not Path(source).exists()
    if named:
        hub.fetch_model(source, weights=request.model.weights != "random")
    if tokenizer == "auto":
        tokenizer = (model_tokenizer(source) or "") if source in model_names() else source
    if hub.is_name(tokenizer) and not Path(tokenizer).exists():
        hub.fetch_tokenizer(tokenizer)


def _run(plan: Plan, place: WorkerPlace | None, options: dict[str, int], *, quiet: bool) -> int:
    """Data, then workers; the exit code."""
    if not quiet:
        _show(plan)
    with _stoppable("preparing data"):
        data = _prepare(plan, quiet=quiet)
    with _stoppable("starting"):  # importing torch takes seconds
        from muletrain.launch import local
        from muletrain.train.build import Session
        from muletrain.train.worker import run_worker

    session = Session(data.folder, options["stop_after"], options["profile_steps"], bool(options["measure_only"]))
    if place is not None:
        return _leave(run_worker(plan, place, session))
    return local.run(lambda own: run_worker(plan, own, session), plan.parallel.workers, Path(plan.run_dir))


def _leave(code: int) -> NoReturn:
    """Ends a torchrun worker at once, all its work written: at interpreter exit c10d's threads sometimes abort the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def _stoppable(doing: str) -> Iterator[None]:
    """A SIGTERM before training: there is nothing to save, and what is fetched or prepared so far is found again."""
    from muletrain.spec.errors import StoppedError

    def stop(_number: int, _frame: object) -> None:
        raise StoppedError(f"stopped while {doing}; the same command goes on where it was")

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _show(plan: Plan) -> None:
    """The plan in a few lines, and why."""
    from muletrain.launch.run_folder import has_checkpoints
    from muletrain.spec.units import format_bytes, format_count

    shape, ledger = plan.model.shape, plan.memory.ledger
    where: Place = "card" if plan.parallel.device == "cuda" else "host"
    typer.echo(
        f"plan: {shape.name}, {format_count(shape.parameters)} parameters, {plan.memory.strategy} on {plan.parallel.workers} "
        f"{plan.parallel.device} worker{'s' if plan.parallel.workers > 1 else ''}, {plan.precision.compute}, "
        f"{format_count(plan.tokens_per_step)} tokens a step, about {format_bytes(ledger.total(where))} of {where} memory"
    )
    if plan.expected.tokens_per_s:
        typer.echo(f"  expected: {plan.expected.tokens_per_s:,.0f} tokens/s ({plan.expected.source})")
    resumes = has_checkpoints(Path(plan.run_dir))
    for reason in plan.reasons:
        if not (resumes and reason.startswith("model.weights = ")):  # they come from the checkpoint
            typer.echo(f"  {reason}")


def _prepare(plan: Plan, *, quiet: bool) -> Prepared:
    """The data set and its rows, made or found, and what it holds: before any worker waits for another."""
    from muletrain.cli.data import shown_progress
    from muletrain.data.dataset import require_vocabulary
    from muletrain.data.pack import row_table
    from muletrain.data.prepare import prepare
    from muletrain.data.report import report_lines

    with shown_progress(quiet=quiet) as progress:
        prepared = prepare(plan.data, progress=progress)
    require_vocabulary(prepared, plan.model.shape.vocab, plan.model.shape.name)
    row_table(prepared, "train", plan.data.sequence_length, plan.data.packing, plan.train.seed)
    if not quiet:
        for line in report_lines(prepared, plan.data.sequence_length, plan.data.packing):
            typer.echo(line)
    return prepared
