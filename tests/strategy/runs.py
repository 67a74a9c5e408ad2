"""Short training runs on made-up packed batches, for comparing strategies, splits and precisions."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from muletrain.data.batch import IGNORE, MicroBatch
from muletrain.models.build import build_on_meta
from muletrain.models.weights import open_weights
from muletrain.optim.schedule import learning_rate
from muletrain.precision.policy import precision_of
from muletrain.spec.plan import ModelPlan, Plan, StreamingPlan
from muletrain.spec.recipe import OptimizerSection, ScheduleSection
from muletrain.strategy.apply import build_strategy
from muletrain.strategy.contract import StepContext, StepResult, Strategy
from tests import plans

ROWS, LENGTH = 8, 32


@dataclass(frozen=True)
class Run:
    """One way to do the same work."""

    model: ModelPlan
    strategy: str = "resident"
    compute: str = "fp64"
    micro_batch: int = 2
    activations: str = "keep"
    clip_norm: float = 1.0
    rate: float = 3e-3
    steps: int = 20
    seed: int = 7
    streaming: dict[str, Any] = field(default_factory=dict)


def plan_of(run: Run, workers: int = 1) -> Plan:
    """The plan of a run over `workers`."""
    return plans.make_plan(
        run.model,
        sequence_length=LENGTH,
        steps=run.steps,
        micro_batch=run.micro_batch,
        micro_batches=ROWS // run.micro_batch,
        clip_norm=run.clip_norm,
        seed=run.seed,
        optimizer=OptimizerSection(learning_rate=run.rate),
        schedule=ScheduleSection(kind="cosine", warmup_steps=3),
        compute=run.compute,
        initial_loss_scale=65536.0,
        strategy=run.strategy,
        activations="recompute" if run.strategy == "streamed" else run.activations,  # all it has
        loss_chunk=24,
        streaming=StreamingPlan(**run.streaming),
        workers=workers,
    )


def rows_of(window: int, vocab: int) -> list[MicroBatch]:
    """ROWS one-row batches with segments of odd lengths and some padding, the same for every split."""
    generator = torch.Generator().manual_seed(1000 + window)
    rows = []
    for row in range(ROWS):
        cuts = sorted({0, LENGTH, *torch.randint(1, LENGTH, (2,), generator=generator).tolist()})
        ids = torch.randint(0, min(40, vocab), (1, LENGTH), generator=generator)
        labels = (ids * 7 + 3) % vocab
        positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(cuts)])[None]
        padding = 0
        if row % 3 == 0:  # the last segment is padding
            labels[:, cuts[-2] :] = IGNORE
            padding = LENGTH - cuts[-2]
        tokens = int((labels != IGNORE).sum())
        bounds = torch.tensor(cuts, dtype=torch.int32)
        rows.append(MicroBatch(row, ids, labels, positions, bounds, LENGTH, tokens, padding, (window * ROWS + row,)))
    return rows


def joined(rows: list[MicroBatch], index: int) -> MicroBatch:
    """Several one-row batches as one."""
    bounds = [rows[0].cu_seqlens[:1]]
    bounds += [row.cu_seqlens[1:] + number * LENGTH for number, row in enumerate(rows)]
    return MicroBatch(
        index,
        torch.cat([r.input_ids for r in rows]),
        torch.cat([r.labels for r in rows]),
        torch.cat([r.position_ids for r in rows]),
        torch.cat(bounds),
        LENGTH,
        sum(r.tokens for r in rows),
        sum(r.padding_tokens for r in rows),
    )


def batches_of(window: int, run: Run, vocab: int, worker: int = 0, workers: int = 1) -> list[MicroBatch]:
    """This worker's micro-batches of a window, filler included."""
    rows = rows_of(window, vocab)
    every = [joined(rows[i : i + run.micro_batch], i // run.micro_batch) for i in range(0, ROWS, run.micro_batch)]
    mine = every[worker::workers]
    while len(mine) < -(-len(every) // workers):
        mine.append(every[0].filler())
    return mine


def start(run: Run, workers: int = 1, device: str = "cpu") -> Strategy:
    """A strategy at step 0."""
    plan = plan_of(run, workers)
    model = build_on_meta(run.model, dtype=precision_of(plan.precision.compute).compute, loss_chunk=24)
    weights = open_weights(run.model, model, run.seed)
    return build_strategy(plan, model, weights, torch.device(device))


def advance(strategy: Strategy, run: Run, first: int, last: int, worker: int = 0, workers: int = 1) -> list[StepResult]:
    """Steps first … last - 1."""
    results = []
    plan, vocab = plan_of(run, workers), run.model.config["vocab_size"]
    for step in range(first, last):
        rate = learning_rate(plan.train.schedule, run.rate, run.steps, step)
        batches = batches_of(step, run, vocab, worker, workers)
        results.append(strategy.step(batches, StepContext(step, step, rate)))
    return results


def curve(results: list[StepResult]) -> list[tuple[float, float]]:
    """(mean loss, norm) by step."""
    return [(r.loss_sum / r.tokens, r.norm) for r in results]


def train(rank: int, workers: int, run: Run) -> list[tuple[float, float]]:
    """A whole run on one of `workers`; the entry of run_workers."""
    strategy = start(run, workers)
    return curve(advance(strategy, run, 0, run.steps, rank, workers))


def train_alone(run: Run) -> list[tuple[float, float]]:
    """A whole run in this process, without a process group."""
    assert not dist.is_initialized()
    return train(0, 1, run)


def worst(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    """Largest relative difference in loss or norm over all steps."""
    assert len(a) == len(b)
    return max(abs(x - y) / abs(y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True))


def with_config(model: ModelPlan, **fields: Any) -> ModelPlan:
    """The model with other config fields."""
    return replace_value(model, config={**model.config, **fields})


def replace_value(value: Any, **fields: Any) -> Any:
    """A frozen value with other fields."""
    return value.model_copy(update=fields) if hasattr(value, "model_copy") else replace(value, **fields)
