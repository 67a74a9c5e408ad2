"""Several streamed workers on one GPU: what sharing one host memory costs over running apart, and whether it is the same model.

Every run is a set of processes forked from one that never touches the GPU (launch.local), so one measurement leaves nothing to
the next. Independent workers start together and do the same work, so that each has the others' company all the time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from muletrain.data.prepare import prepare
from muletrain.launch import local
from muletrain.models.build import build_on_meta
from muletrain.optim.schedule import learning_rate
from muletrain.precision.policy import precision_of
from muletrain.schedule.ops import Op, Schedule
from muletrain.spec.place import WorkerPlace
from muletrain.spec.plan import Plan
from muletrain.strategy.apply import build_strategy
from muletrain.strategy.contract import StepContext

from .setting import DrawnOnDevice, cap_memory, device_here, plan_for, stream_of, wait
from .streamed import busy

UNTIMED = 3
"""Steps at the start: the first compiles, and buffers find their sizes."""
FETCHES = ("fetch", "fetch_state", "fetch_gradient", "fetch_part", "receive")
STORES = ("publish", "store", "store_part", "store_sum", "send")
MOVES = frozenset((*FETCHES, *STORES, "signal", "wait"))
"""Kinds of ops that move bytes or wait for others'."""


class Drawn(DrawnOnDevice):
    """First values that every process draws alike."""

    def tensor(self, name: str) -> torch.Tensor:
        """Seeded by name."""
        torch.manual_seed(zlib.crc32(name.encode()))
        return super().tensor(name)


class WithoutMoves:
    """Runs the schedule without what moves bytes: the arithmetic alone, on whatever is on the card."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def run(self, schedule: Schedule, handler: Callable[[Op], None]) -> None:
        """See Executor."""
        self._inner.run(schedule, lambda op: None if op.kind in MOVES else handler(op))


def compared(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All three runs."""
    workers = options.workers
    plans = {
        "one": _plan(folder, options, options.tokens, 1),
        "independent": _plan(folder, options, options.tokens // workers, 1),
        "shared": _plan(folder, options, options.tokens, workers),
    }
    prepare(plans["one"].data)
    record: dict[str, Any] = {"options": {name: str(value) for name, value in vars(options).items()}}
    for name, plan in plans.items():
        if name not in options.runs.split(","):
            continue
        start, count = time.perf_counter(), 1 if name == "one" else workers
        steps = options.independent_steps if name == "independent" else options.steps
        streaming, ledger = plan.memory.streaming, plan.memory.ledger
        print(
            f"{name}: {count} x {len(streaming.on_card)} units on the card, {streaming.waves} wave(s), planned "
            f"{ledger.total('card') / 2**30:.1f} GiB a card, {ledger.total('host') / 2**30:.1f} on the host",
            flush=True,
        )
        local.run(lambda place, p=plan, n=name, s=steps: _worker(p, place, folder, n, s, options), count)  # type: ignore[misc]
        found = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(count)]
        record[name] = {"workers": found, "plan": plan.model_dump(mode="json")}
        print(f"  took {time.perf_counter() - start:.0f} s; worker 0: {_line(found[0])}", flush=True)
    return record


def _line(found: dict[str, Any]) -> str:
    times = [round(seconds, 2) for seconds in found["times"]]
    return f"built in {found['built_s']:.0f} s, steps {times}, peak {found['peak_gib']:.1f} GiB\n    busy {found['busy_s']}"


def _plan(folder: Path, options: argparse.Namespace, tokens: int, workers: int) -> Plan:
    keys: dict[str, dict[str, Any]] = {
        "train": {
            "tokens_per_step": tokens,
            "micro_batch": min(options.micro_batch, tokens // (workers * options.sequence)),
            "clip_norm": 1.0,
            "optimizer": {"learning_rate": 1e-4, "state": options.moments},
        },
        "precision": {"compute": options.compute},
        "memory": {"strategy": "streamed", "loss_chunk": 4096},
    }
    if options.placement >= 0:
        keys["memory"]["placement"] = options.placement
    card = round(options.card_gib * 2**30)
    return plan_for(folder, options.shape, keys, sequence=options.sequence, card_bytes=card, workers=workers)


def _worker(plan: Plan, place: WorkerPlace, folder: Path, name: str, steps: int, options: argparse.Namespace) -> int:
    """One process; leaves its figures in `folder`."""
    device = device_here()
    if device.type == "cuda":
        torch.cuda.set_device(0)
        cap_memory(round(options.card_gib * 2**30))
    else:
        torch.set_num_threads(1)
    if plan.parallel.workers > 1:
        dist.init_process_group("gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.workers)
    start = time.perf_counter()
    model = build_on_meta(plan.model, dtype=precision_of(plan.precision.compute).compute, loss_chunk=plan.memory.loss_chunk)
    strategy: Any = build_strategy(plan, model, Drawn(model), device)
    run = _Run(plan, strategy, place.rank if plan.parallel.workers > 1 else 0)
    run.step(0, rate=0.0)  # compiles; nothing is learnt
    built_s = time.perf_counter() - start
    _together(folder, name, place)
    times = [run.step(window) for window in range(steps)]
    losses = list(run.losses[1:])
    traced: list[Any] = []
    if device.type == "cuda":
        strategy.executor.traced = traced
        run.step(steps)
        strategy.executor.traced = None
    pairs = [run.pair(steps) for _ in range(options.repeats)] if name == "shared" else []
    found = {
        "built_s": built_s,
        "times": times,
        "losses": losses,
        "pairs": pairs,
        "busy_s": busy(traced)[0],
        "peak_gib": torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else 0.0,
    }
    (folder / f"{name}-{place.rank}.json").write_text(json.dumps(found))
    _together(folder, f"{name}-end", place)
    return 0


class _Run:
    """The steps of one worker."""

    def __init__(self, plan: Plan, strategy: Any, rank: int) -> None:
        self._plan, self._strategy, self._rank, self._stream = plan, strategy, rank, stream_of(plan)
        self.losses: list[float] = []

    def step(self, window: int, rate: float | None = None) -> float:
        """Seconds of one step."""
        plan = self._plan
        batches = self._stream.window(window, self._rank, plan.parallel.workers)
        if rate is None:
            rate = learning_rate(plan.train.schedule, plan.train.optimizer.learning_rate, plan.train.steps, window)
        wait()
        start = time.perf_counter()
        result = self._strategy.step(batches, StepContext(window, window, rate))
        wait()
        self.losses.append(result.loss_sum / result.tokens)
        return time.perf_counter() - start

    def pair(self, window: int) -> tuple[float, float]:
        """Seconds of a step, and of one without copies and waits. Nothing is learnt, so that all numbers stay finite."""
        strategy, executor = self._strategy, self._strategy.executor
        self.step(window, rate=0.0)
        whole = statistics.mean(self.step(window, rate=0.0) for _ in range(2))
        strategy.executor = WithoutMoves(executor)
        try:
            self.step(window, rate=0.0)
            alone = statistics.mean(self.step(window, rate=0.0) for _ in range(2))
        finally:
            strategy.executor = executor
        return whole, alone


def _together(folder: Path, name: str, place: WorkerPlace) -> None:
    """Until all workers of a run are here."""
    (folder / f"{name}-{place.rank}.here").touch()
    while not all((folder / f"{name}-{rank}.here").exists() for rank in range(place.workers)):
        time.sleep(0.01)


def _partly(record: dict[str, Any], speed: Callable[[dict[str, Any], float], float], tokens: int, workers: int) -> str:
    """What there is, where not all three were run."""
    lines = []
    for name in ("one", "independent", "shared"):
        found = record.get(name, {}).get("workers", [])
        together = 1 if name == "shared" else len(found)
        share = tokens / workers if name == "independent" else tokens
        lines += [f"{name}: {sum(speed(each, share) for each in found[:together]):.0f} tokens/s"] if found else []
    for whole, alone in record.get("shared", {}).get("workers", [{}])[0].get("pairs", []):
        lines.append(f"exposed {1 - alone / whole:.1%}")
    if "one" in record and "shared" in record:
        pairs = zip(record["one"]["workers"][0]["losses"], record["shared"]["workers"][0]["losses"], strict=True)
        lines.append(f"loss apart at most {max(abs(a - b) for a, b in pairs):.4f}")
    return "\n".join(lines)


def table(record: dict[str, Any]) -> str:
    """Ratios first."""
    options = record["options"]
    tokens, workers = int(options["tokens"]), int(options["workers"])

    def speed(found: dict[str, Any], share: float) -> float:
        return share / statistics.median(found["times"][UNTIMED:])

    missing = [name for name in ("one", "independent", "shared") if name not in record]
    if missing:
        return _partly(record, speed, tokens, workers)
    one = speed(record["one"]["workers"][0], tokens)
    apart = sum(speed(found, tokens / workers) for found in record["independent"]["workers"])
    shared = speed(record["shared"]["workers"][0], tokens)
    pairs = record["shared"]["workers"][0]["pairs"]
    exposed = [1 - alone / whole for whole, alone in pairs]
    first, second = record["one"]["workers"][0]["losses"], record["shared"]["workers"][0]["losses"]
    difference = max(abs(a - b) for a, b in zip(first, second, strict=True))
    record["summary"] = {
        "shared_over_independent": shared / apart, "exposed": exposed, "loss_apart": difference,
        "tokens_per_s": {"one": one, "independent": apart, "shared": shared},
    }  # fmt: skip
    return "\n".join(
        [
            f"{workers} workers, {options['shape']} shape, {tokens} tokens a step in all",
            f"  shared over independent  {shared / apart:.3f}   ({shared:.0f} of {apart:.0f} tokens/s; one alone {one:.0f})",
            f"  exposed communication    {statistics.median(exposed):.1%}   (median of {[f'{e:.1%}' for e in exposed]})",
            f"  loss apart, at most      {difference:.4f}  (over {len(first)} steps: {first[0]:.3f} -> {first[-1]:.3f} alone, "
            f"{second[0]:.3f} -> {second[-1]:.3f} shared)",
        ]
    )
