"""An adapter beside a frozen model that streams: a 32 B shape on a card held to 24 GiB, two bytes a parameter in host memory.

The frozen weights are of no account to the time, so one block's are drawn and all blocks get them. Rows are full and of one
document each, which is the most attention there can be.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from muletrain.data.batch import MicroBatch
from muletrain.models.build import build_on_meta
from muletrain.models.causal import canonical_name
from muletrain.models.lora import matrix_of
from muletrain.precision.policy import precision_of
from muletrain.spec.plan import Plan
from muletrain.strategy.apply import build_strategy
from muletrain.strategy.contract import StepContext

from .predicted import beside, probed
from .setting import DriverMemory, cap_memory, device_here, host_peak_gib, matmul_rate, plan_for, wait
from .streamed import busy
from .workers import WithoutMoves

UNTIMED = 2
"""Steps at the start: the first compiles, and buffers find their sizes."""


class OneBlock:
    """First values: each kind of matrix drawn once, on the device, in the compute format, and given to every block."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self._shapes = {canonical_name(name): p.shape for name, p in model.named_parameters()}
        self.names, self.unexpected, self._dtype = tuple(self._shapes), (), dtype
        self._drawn: dict[str, torch.Tensor] = {}

    def tensor(self, name: str) -> torch.Tensor:
        """Norms are ones, B zeros, matrices normal with deviation 0.02."""
        shape, kind = self._shapes[name], re.sub(r"\.\d+\.", ".", name)
        if matrix_of(name) == "B":
            return torch.zeros(shape)
        if kind not in self._drawn:
            drawn = torch.empty(shape, dtype=self._dtype, device=device_here())
            self._drawn[kind] = (drawn.fill_(1.0) if len(shape) == 1 else drawn.normal_(0.0, 0.02)).cpu()
        return self._drawn[kind]


def rows(plan: Plan, window: int) -> list[MicroBatch]:
    """A step's micro-batches of random tokens, every position trained."""
    train, length, vocab = plan.train, plan.data.sequence_length, plan.model.shape.vocab
    generator, batches = torch.Generator().manual_seed(window), []
    for index in range(train.micro_batches):
        ids = torch.randint(0, vocab, (train.micro_batch, length), generator=generator)
        positions = torch.arange(length).expand(train.micro_batch, -1).contiguous()
        bounds = torch.empty(0, dtype=torch.int32)
        batches.append(MicroBatch(index, ids, ids.roll(-1, 1), positions, bounds, length, ids.numel(), 0))
    return batches


def _plan(folder: Path, options: argparse.Namespace) -> Plan:
    keys: dict[str, dict[str, Any]] = {
        "model": {
            "source": str(folder / options.shape),
            "weights": "random",
            "adapter": {"kind": "lora", "rank": options.rank, "dropout": options.dropout},
        },
        "train": {
            "tokens_per_step": options.tokens,
            "micro_batch": min(options.micro_batch, options.tokens // options.sequence),
            "optimizer": {"learning_rate": 1e-4, "weight_decay": 0.0},
        },
        "precision": {"compute": options.compute},
        "memory": {"strategy": "streamed", "loss_chunk": options.loss_chunk, "host_limit": options.host_gib * 2**30},
    }
    if options.placement >= 0:
        keys["memory"]["placement"] = options.placement
    return plan_for(folder, options.shape, keys, sequence=options.sequence, card_bytes=round(options.card_gib * 2**30))


def _steps(plan: Plan, strategy: Any, count: int, first: int) -> tuple[list[float], list[float], list[Any]]:
    """(seconds, losses, traced ops of the last step)."""
    times: list[float] = []
    losses: list[float] = []
    traced: list[Any] = []
    for window in range(first, first + count):
        batches = rows(plan, 0)  # the same each time, so that the loss falls if anything is learnt
        if hasattr(strategy.executor, "traced"):
            strategy.executor.traced = traced if window == first + count - 1 else None
        wait()
        start = time.perf_counter()
        result = strategy.step(batches, StepContext(window, window, 1e-4))
        wait()
        times.append(time.perf_counter() - start)
        losses.append(result.loss_sum / result.tokens)
    return times, losses, traced


def lora_part(options: argparse.Namespace) -> dict[str, Any]:
    """Builds, measures, prints."""
    rate, machine = matmul_rate(), probed(options.out) if options.predict else None
    cap_memory(round(options.card_gib * 2**30))
    with tempfile.TemporaryDirectory() as name:
        plan = _plan(Path(name), options)
    shape, adapter, layout = plan.model.shape, plan.model.adapter, plan.memory.streaming
    batch = f"{plan.train.micro_batches} x {plan.train.micro_batch} x {plan.data.sequence_length} tokens a step"
    print(
        f"{options.shape}: {shape.parameters / 1e9:.1f} B frozen in {plan.precision.compute}, {adapter.parameters / 1e6:.1f} M "
        f"trained (rank {adapter.rank}); {batch}; {max(0, len(layout.on_card) - 2)} of {shape.layers} blocks on the card; "
        f"matmul {rate / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    start, dtype = time.perf_counter(), precision_of(plan.precision.compute).compute
    model = build_on_meta(plan.model, dtype=dtype, loss_chunk=plan.memory.loss_chunk)
    weights = OneBlock(model, dtype)
    strategy = build_strategy(plan, model, weights, device_here())
    built_s = time.perf_counter() - start
    print(f"built in {built_s:.0f} s, host {host_peak_gib():.1f} GiB", flush=True)
    with DriverMemory() as memory:
        times, losses, traced = _steps(plan, strategy, options.steps, 0)
    record = _record(plan, options, rate, times, losses, traced, memory)
    record["built_s"] = built_s
    if machine is not None:
        record["predicted"] = beside(plan, machine, traced, record["step_s"], memory.peak_bytes, options.out, "lora")
    strategy.executor = WithoutMoves(strategy.executor)
    still, _, _ = _steps(plan, strategy, 3, options.steps)
    record["without_copies_s"] = min(still)
    record["exposed_of_copies"] = max(0.0, 1.0 - min(still) / record["step_s"])
    print(
        f"  without copies {min(still):.3f} s a step: exposed transfer {record['exposed_of_copies']:.1%} of a step", flush=True
    )
    strategy.close()
    del strategy, model
    gc.collect()
    return record


def _record(
    plan: Plan,
    options: argparse.Namespace,
    rate: float,
    times: list[float],
    losses: list[float],
    traced: list[Any],
    memory: DriverMemory,
) -> dict[str, Any]:
    step_s, tokens = statistics.median(times[UNTIMED:]), plan.tokens_per_step
    flops = plan.model.shape.flops_a_token(plan.data.sequence_length, plan.model.adapter.parameters)
    parts, traced_s = busy(traced)
    waits = 1.0 - parts["compute"] / traced_s if traced_s else None
    card, host = (plan.memory.ledger.total(place) / 2**30 for place in ("card", "host"))
    peak, host_peak = memory.peak_bytes / 2**30, host_peak_gib()
    held = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    print(
        f"  {tokens / step_s:.0f} tokens/s, step {step_s:.3f} s of {[round(t, 2) for t in times]}, model FLOPs "
        f"{flops * tokens / step_s / rate:.1%} of the matmul rate\n"
        f"  compute stream waits {'not traced' if waits is None else f'{waits:.1%} of the step'}; busy {parts}\n"
        f"  device {peak:.2f} GiB by the driver (planned {card:.2f}, PyTorch {held:.2f}), host {host_peak:.1f} GiB (planned "
        f"{host:.1f}), loss {losses[0]:.4f} -> {losses[-1]:.4f}",
        flush=True,
    )
    within = peak <= options.card_gib and host_peak <= options.host_gib
    print(
        f"  {'within' if within else 'NOT within'} {options.card_gib:g} GiB of card and {options.host_gib} GiB of host memory",
        flush=True,
    )
    return {
        "plan": plan.model_dump(mode="json"), "tokens": tokens, "tokens_per_s": tokens / step_s, "step_s": step_s,
        "times": times, "losses": losses, "busy_s": parts, "traced_s": traced_s, "compute_waits": waits, "device_gib": peak,
        "allocated_gib": held, "planned_gib": card, "host_gib": host_peak, "planned_host_gib": host, "matmul_flops": rate,
        "model_flops_share": flops * tokens / step_s / rate, "within": within,
    }  # fmt: skip
