"""`streamed` on a card held to 24 GiB: tokens a second over a ceiling of 0.70 of the matrix product's rate in the same call (a
resident run of this shape without recomputation does not fit beside it), by tokens a step, formats and clip."""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from muletrain.models.build import build_on_meta
from muletrain.optim.schedule import learning_rate
from muletrain.precision.policy import precision_of
from muletrain.spec.machine import Machine
from muletrain.spec.plan import Plan
from muletrain.strategy.apply import build_strategy
from muletrain.strategy.contract import StepContext

from .predicted import beside, probed
from .setting import (
    DrawnOnDevice,
    DriverMemory,
    cap_memory,
    device_here,
    host_peak_gib,
    matmul_rate,
    plan_for,
    stream_of,
    text_corpus,
    wait,
)

CEILING = 0.70
"""Of the matrix product's rate: what the model's own arithmetic is done at where everything is on the card."""


def plans(folder: Path, options: argparse.Namespace) -> Iterator[tuple[str, list[Plan]]]:
    """(name, plans that one built strategy can run) by formats and clip; sizes whose layout differs are built apart."""
    for moments, clip in itertools.product(options.moments.split(","), map(float, options.clip.split(","))):
        found = [_plan(folder, options, moments, clip, int(tokens)) for tokens in options.tokens.split(",")]
        for layout in dict.fromkeys(plan.memory.streaming for plan in found):
            same = [plan for plan in found if plan.memory.streaming == layout]
            yield f"{options.shape} {moments} clip {clip:g}, {len(layout.on_card)} units on the card", same


def _plan(folder: Path, options: argparse.Namespace, moments: str, clip: float, tokens: int) -> Plan:
    keys: dict[str, dict[str, Any]] = {
        "train": {
            "tokens_per_step": tokens,
            "micro_batch": min(options.micro_batch, tokens // options.sequence),
            "clip_norm": clip,
            "optimizer": {"learning_rate": 1e-4, "state": moments},
        },
        "precision": {"compute": options.compute},
        "memory": {"strategy": "streamed", "loss_chunk": options.loss_chunk, "waves": options.waves},
    }
    if options.placement >= 0:
        keys["memory"]["placement"] = options.placement
    return plan_for(folder, options.shape, keys, sequence=options.sequence, card_bytes=round(options.card_gib * 2**30))


def steps(plan: Plan, strategy: Any, count: int) -> tuple[list[float], list[float], list[Any]]:
    """(seconds, losses, traced ops of the last step)."""
    stream, times, losses, traced = stream_of(plan), [], [], []
    for window in range(count):
        batches = stream.window(window, 0, 1)
        rate = learning_rate(plan.train.schedule, plan.train.optimizer.learning_rate, plan.train.steps, window)
        strategy.executor.traced = traced if window == count - 1 else None
        wait()
        start = time.perf_counter()
        result = strategy.step(batches, StepContext(window, window, rate))
        wait()
        times.append(time.perf_counter() - start)
        losses.append(result.loss_sum / result.tokens)
    strategy.executor.traced = None
    return times, losses, traced


def busy(traced: list[Any]) -> tuple[dict[str, float], float]:
    """(seconds by resource and by kind of op, seconds in all) of one traced step."""
    if not traced:
        return {}, 0.0
    first, total, end = traced[0][1], {}, 0.0
    for op, begin, finish in traced:
        a, b = first.elapsed_time(begin) / 1e3, first.elapsed_time(finish) / 1e3
        for name in (op.resource, op.kind):
            total[name] = total.get(name, 0.0) + b - a
        end = max(end, b)
    return {name: round(seconds, 3) for name, seconds in total.items()}, end


def streamed_part(options: argparse.Namespace) -> dict[str, Any]:
    """All points asked for, one line each, ratios first."""
    rate, device, machine = matmul_rate(), device_here(), probed(options.out)
    assert machine.measured is not None
    links = machine.measured.links[0] if machine.measured.links else None
    cap_memory(round(options.card_gib * 2**30))
    shown = {way: round(getattr(links, way).median / 1e9, 1) for way in ("up", "down", "both")} if links else {}
    print(f"bf16 matmul {rate / 1e12:.0f} TFLOP/s, link {shown} GB/s", flush=True)
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text_corpus(folder)
        for label, same in plans(folder, options):
            start = time.perf_counter()
            model = build_on_meta(
                same[0].model, dtype=precision_of(same[0].precision.compute).compute, loss_chunk=same[0].memory.loss_chunk
            )
            strategy = build_strategy(same[-1], model, DrawnOnDevice(model), device)
            print(f"{label}: built in {time.perf_counter() - start:.0f} s", flush=True)
            for plan in same:
                point = _point(plan, strategy, options, rate, machine)
                records.append({"name": label, "plan": plan.model_dump(mode="json"), **point})
            strategy.close()
            del strategy, model
            gc.collect()
            torch.cuda.empty_cache()
    return {"matmul_flops": rate, "links": shown, "runs": records}


def _point(plan: Plan, strategy: Any, options: argparse.Namespace, rate: float, machine: Machine) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats() if torch.cuda.is_available() else None
    with DriverMemory() as memory:
        times, losses, traced = steps(plan, strategy, options.steps)
    step_s, tokens = statistics.median(times[2:]), plan.tokens_per_step
    ceiling = CEILING * rate / plan.model.shape.flops_a_token(plan.data.sequence_length)
    parts, traced_s = busy(traced)
    planned, peak = plan.memory.ledger.total("card") / 2**30, memory.peak_bytes / 2**30
    host, planned_host = host_peak_gib(), plan.memory.ledger.total("host") / 2**30
    print(
        f"  {tokens / step_s / ceiling:.3f} of the ceiling ({ceiling:.0f}): {tokens:6d} tokens a step, {tokens / step_s:6.0f} "
        f"tok/s, step {step_s:.3f} s of {[round(t, 2) for t in times]}, device {peak:.1f} GiB (planned {planned:.1f}), "
        f"host {host:.1f} (planned {planned_host:.1f}), loss "
        f"{losses[0]:.3f} -> {losses[-1]:.3f}\n    busy {parts}",
        flush=True,
    )
    name = f"{options.shape}-{plan.train.optimizer.state}-clip{plan.train.clip_norm:g}-{tokens}"
    predicted = beside(plan, machine, traced, step_s, memory.peak_bytes, options.out, name)
    return {
        "tokens": tokens, "tokens_per_s": tokens / step_s, "of_ceiling": tokens / step_s / ceiling, "step_s": step_s,
        "times": times, "losses": losses, "device_gib": peak, "planned_gib": planned, "traced_s": traced_s, "busy_s": parts,
        "host_gib": host, "planned_host_gib": planned_host,
        "predicted": predicted,
    }  # fmt: skip
