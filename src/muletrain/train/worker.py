"""One worker, from its place to its exit code: device, process group, parts, position, dry batch, loop.

The dry batch of the longest shape comes before step 1, so running out of memory and compiling happen while nothing is lost yet,
and neither is in the speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from muletrain.checkpoint import load, save
from muletrain.checkpoint.progress import Progress, plan_summary
from muletrain.spec.errors import EXIT_DONE, EXIT_STOPPED, DoesNotFitError
from muletrain.spec.place import WorkerPlace
from muletrain.spec.plan import Plan
from muletrain.spec.units import format_bytes, format_duration
from muletrain.train.build import CHECKPOINTS, Parts, Session, build_hooks, build_log, build_parts
from muletrain.train.device import set_device
from muletrain.train.hooks import Log
from muletrain.train.loop import Run, train
from muletrain.train.resume import carry_over
from muletrain.train.signs import Signs

_COLLECTIVE_TIMEOUT_S = 7200.0
"""Long, because worker 0 may write a large model while the others wait. A dead worker is the launcher's to notice."""


def run_worker(plan: Plan, place: WorkerPlace, session: Session) -> int:
    """Trains as the plan says; returns 0 (finished, measured) or 75 (saved after a signal or session.stop_after updates).

    Call before CUDA is initialised in this process. Raises MuleError for what a user can mend, anything else for our bugs.
    """
    device = set_device(plan, place)
    with _process_group(plan, place, device):
        log = build_log(plan, place)
        try:
            return _session(plan, place, session, device, log)
        except torch.OutOfMemoryError as error:
            raise DoesNotFitError(_out_of_memory(plan, place, error)) from error
        finally:
            log.close()


def _session(plan: Plan, place: WorkerPlace, session: Session, device: torch.device, log: Log) -> int:
    signs = Signs(place, plan.parallel.hang_after_s)
    signs.show("loading the model")
    parts = build_parts(plan, session.data, device)
    progress, resumed = _position(plan, place, parts, log)
    run = Run(
        plan=plan,
        strategy=parts.strategy,
        stream=parts.stream,
        progress=progress,
        worker=place.rank,
        workers=place.workers,
        stop_after=session.stop_after,
        resumed=resumed,
        signs=signs,
    )
    if parts.unexpected:
        log.warn(
            progress.update,
            f"model.source: {len(parts.unexpected)} tensors have no place in the model and are not used: "
            f"{', '.join(parts.unexpected[:3])}",
        )
    if run.finished:
        log.console.say(
            f"nothing to train: the run is at update {progress.update} of {run.total_updates} already. "
            "A higher train.steps or train.epochs goes on from here"
        )
        return EXIT_DONE
    if plan.train.compile:
        log.console.say("dry batch: compiling, which takes a while and counts in no speed")
    signs.show("the dry batch")
    parts.strategy.warm_up(parts.stream.longest())
    if plan.train.compile:  # a batch with segments too: what compiles, compiles here
        for batch in parts.stream.window(progress.window, place.rank, place.workers)[:1]:
            parts.strategy.warm_up(batch)
    hooks = build_hooks(run, parts, session, log)
    with run.stop.listening():
        outcome = train(run, hooks)
    log.console.say(
        f"{outcome} at update {run.progress.update} of {run.total_updates}: {run.meter.steps} steps in "
        f"{format_duration(run.meter.step_seconds)}, {run.meter.tokens_per_s:,.0f} tokens/s"
        + ("; the same command continues" if outcome == "stopped" else "")
    )
    measured = session.measure_only and run.progress.update - run.started_at >= session.stop_after > 0
    return EXIT_STOPPED if outcome == "stopped" and not measured else EXIT_DONE


def _position(plan: Plan, place: WorkerPlace, parts: Parts, log: Log) -> tuple[Progress, bool]:
    """(where to start, whether that is a resume); the strategy is filled. Collective."""
    root = Path(plan.run_dir) / CHECKPOINTS
    if place.rank == 0:
        for left in save.clean_up(root):
            log.warn(0, f"{left.name} was left by a save that never ended; removed")
    folder = load.choose(root, lambda message: log.warn(0, message))
    if folder is None:
        return _beginning(plan, parts), False
    saved = load.read_progress(folder)
    load.load(folder, parts.strategy, saved)
    progress, notes = carry_over(saved, plan, parts.stream.windows_per_epoch, parts.data_fingerprint)
    log.console.say(f"resumes from {folder.name}: update {progress.update}, window {progress.window}")
    for note in notes:
        log.console.say(f"  {note}")
    return progress, True


def _beginning(plan: Plan, parts: Parts) -> Progress:
    return Progress(
        windows_per_epoch=parts.stream.windows_per_epoch,
        rows_per_window=plan.train.micro_batches * plan.train.micro_batch,
        data_fingerprint=parts.data_fingerprint,
        seed=plan.train.seed,
        summary=plan_summary(plan),
    )


@contextmanager
def _process_group(plan: Plan, place: WorkerPlace, device: torch.device) -> Iterator[None]:
    """Several workers need a group, zero1 to zero3 always do. Objects and small sums go over the host (gloo) on GPUs too, and
    streamed needs nothing else."""
    if place.workers == 1 and not plan.memory.strategy.startswith("zero"):
        yield
        return
    cuda = device.type == "cuda" and plan.memory.strategy != "streamed"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        init_method=place.rendezvous,
        rank=place.rank,
        world_size=place.workers,
        timeout=timedelta(seconds=_COLLECTIVE_TIMEOUT_S),
        device_id=device if cuda else None,
    )
    yield
    dist.barrier()  # not in a finally: after a failure the others may be gone, and the launcher ends this process
    dist.destroy_process_group()


def _out_of_memory(plan: Plan, place: WorkerPlace, error: torch.OutOfMemoryError) -> str:
    peak = format_bytes(torch.cuda.max_memory_reserved()) if torch.cuda.is_available() else "unknown"
    cap = f", capped to {format_bytes(plan.memory.gpu_limit)} by memory.gpu_limit" if plan.memory.gpu_limit else ""
    return (
        f"worker {place.rank} ran out of card memory (peak {peak}{cap}) with {plan.train.micro_batch} sequences of "
        f"{plan.data.sequence_length} tokens under memory.strategy={plan.memory.strategy}. What helps, in this order: "
        "memory.activations=recompute, a smaller train.micro_batch, memory.strategy=zero3 with more workers, a smaller "
        f"memory.loss_chunk, a smaller data.sequence_length. PyTorch says: {str(error).splitlines()[0]}"
    )
