"""`resident`, compiled, against the matrix product: a 1.2 B LLaMA shape (hidden 2048, 16 layers, ffn 8192, 32 heads, 8 kv,
vocabulary 128256, tied), sequence 4096, 32,768 tokens a step, bf16 and fp16 with fp32 masters, no recompute, real text, packed.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from muletrain.data.stream import TrainingStream
from muletrain.models.build import build_on_meta
from muletrain.models.weights import open_weights
from muletrain.optim.schedule import learning_rate
from muletrain.precision.policy import precision_of
from muletrain.spec.plan import Plan
from muletrain.strategy.apply import build_strategy
from muletrain.strategy.contract import StepContext

from .setting import device_here, matmul_rate, plan_for, stream_of, text_corpus, wait

SEQUENCE, STEP_TOKENS = 4096, 32_768


@dataclass
class Measured:
    """One configuration."""

    name: str
    tokens_per_s: float
    step_s: float
    spread: float
    of_matmul: float
    peak_gib: float
    parts_ms: dict[str, float]
    losses: list[float]
    skipped: int


def measure(name: str, plan: Plan, stream: TrainingStream, steps: int, rate: float) -> Measured:
    """Trains `steps` steps after a dry batch; the first two are not timed."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()  # what an earlier configuration left is not this one's peak
    torch.cuda.reset_peak_memory_stats()
    model = build_on_meta(plan.model, dtype=precision_of(plan.precision.compute).compute, loss_chunk=plan.memory.loss_chunk)
    strategy = build_strategy(plan, model, open_weights(plan.model, model, plan.train.seed), device_here())
    strategy.warm_up(stream.longest())
    times, losses, parts, update, skipped = [], [], [], 0, 0
    for window in range(steps):
        batches = stream.window(window, 0, 1)
        rate_now = learning_rate(plan.train.schedule, plan.train.optimizer.learning_rate, plan.train.steps, update)
        wait()
        start = time.perf_counter()
        result = strategy.step(batches, StepContext(update, window, rate_now))
        times.append(time.perf_counter() - start)
        update += not result.skipped
        skipped += result.skipped
        losses.append(result.loss_sum / result.tokens)
        parts.append(result.parts_s)
    timed = times[2:]
    step_s = statistics.median(timed)
    flops = plan.model.shape.flops_a_token(SEQUENCE) * STEP_TOKENS
    peak = torch.cuda.max_memory_reserved() / 2**30
    del strategy, model
    return Measured(
        name,
        STEP_TOKENS / step_s,
        step_s,
        (max(timed) - min(timed)) / step_s,
        flops / step_s / rate,
        peak,
        {key: 1e3 * statistics.median(p[key] for p in parts[2:]) for key in parts[0]},
        losses,
        skipped,
    )


def resident_part(quick: bool) -> dict[str, Any]:
    """bf16 against the matmul rate, fp16 against bf16."""
    rate = matmul_rate()
    print(f"{torch.cuda.get_device_name()}  bf16 matmul {rate / 1e12:.0f} TFLOP/s", flush=True)
    runs: list[Measured] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text_corpus(folder)
        cases = [("bf16", 4, 4096, "keep"), ("fp16", 4, 4096, "keep")]
        if not quick:
            cases += [("bf16", 2, 4096, "keep"), ("bf16", 8, 4096, "keep"), ("bf16", 4, 8192, "keep")]
            cases += [("bf16", 8, 4096, "recompute")]
        for compute, micro_batch, loss_chunk, activations in cases:
            keys = {
                "train": {"tokens_per_step": STEP_TOKENS, "micro_batch": micro_batch, "optimizer": {"learning_rate": 3e-4}},
                "precision": {"compute": compute},
                "memory": {"strategy": "resident", "activations": activations, "loss_chunk": loss_chunk},
            }
            plan = plan_for(folder, "1b", keys)
            label = f"{compute} micro-batch {micro_batch} chunk {loss_chunk} {activations}"
            start = time.perf_counter()
            run = measure(label, plan, stream_of(plan), 12 if quick else 24, rate)
            runs.append(run)
            planned = plan.memory.ledger.total("card") / 2**30
            parts = {part: round(ms) for part, ms in run.parts_ms.items()}
            print(
                f"{label:42s} {run.tokens_per_s:8.0f} tok/s  {run.of_matmul:5.1%} of matmul  spread {run.spread:5.1%}  "
                f"peak {run.peak_gib:5.1f} GiB (planned {planned:5.1f})  {parts}  "
                f"loss {run.losses[0]:.3f} -> {run.losses[-1]:.3f}  [{time.perf_counter() - start:.0f} s]",
                flush=True,
            )
    apart = max(abs(a - b) / b for a, b in zip(runs[1].losses, runs[0].losses, strict=True))
    speed = runs[1].tokens_per_s / runs[0].tokens_per_s
    print(f"fp16 / bf16: speed {speed:.3f}, loss curve apart at most {apart:.2%}, skipped {runs[1].skipped}")
    records = [asdict(run) for run in runs]
    return {"device": torch.cuda.get_device_name(), "matmul_flops": rate, "runs": records, "fp16_apart": apart}
