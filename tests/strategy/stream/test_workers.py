"""Several workers of one box: the numbers of one worker, whatever the layout; all gone within seconds when one is killed."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from muletrain.optim.flat import FlatLayout
from muletrain.schedule.ops import Op, Schedule, index_in
from muletrain.spec.errors import WorkerFailedError
from muletrain.spec.plan import ModelPlan
from muletrain.strategy.contract import NonFiniteError
from muletrain.strategy.stream.exchange import cut
from muletrain.strategy.stream.executor import Handler, Threads
from tests.dist.workers import run_workers
from tests.strategy.runs import Run, advance, curve, start, train, train_alone, worst
from tests.strategy.stream.test_engine import MLA_AND_EXPERTS
from tests.strategy.test_seam import _fp16, _with_evaluations, _with_warm_up

SMALL = {"piece": 1024}
LAYOUTS: list[dict[str, Any]] = [
    {"slots": 1, "staging": 1, "ring": 1, "waves": 3},
    {"inputs": "host", "waves": 2, "slices": (3, 1, 2)},
    {"on_card": (0, 2, 4), "waves": 3},
    {"on_card": (0, 1, 2, 3, 4), "slices": (0, 5, 1)},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_gives_one_workers_numbers(models: dict[str, ModelPlan], layout: dict[str, Any]) -> None:
    """4 micro-batches over 3 workers, 20 steps with clipping, fp32."""
    run = Run(models["llama"], strategy="streamed", compute="fp32", rate=1e-3)
    expected = train_alone(run)
    curves = run_workers(3, train, replace(run, streaming={**SMALL, **layout}))
    assert curves[0] == curves[1] == curves[2], "all workers report the same"
    assert worst(curves[0], expected) < 1e-5


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "experts"])
@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
def test_every_family_gives_one_workers_numbers(models: dict[str, ModelPlan], family: str, clip_norm: float) -> None:
    """A tied head, dropout, layers that differ (experts do not run in float64)."""
    compute, rate, bound = ("fp32", 1e-3, 1e-5) if family == "experts" else ("fp64", 3e-3, 1e-6)
    model = models.get(family) or models["llama"].model_copy(update={"config": MLA_AND_EXPERTS, "weights": "random"})
    run = Run(model, "streamed", compute, rate=rate, clip_norm=clip_norm, streaming={**SMALL, "waves": 2})
    expected = train_alone(replace(run, strategy="resident"))
    for found in run_workers(3, train, run):
        assert worst(found, expected) < bound


def test_slices_follow_their_shares_in_whole_blocks() -> None:
    """20 blocks of 256 numbers, the last 4 not decayed, shared 1 : 0 : 3; a piece never spans two owners."""
    layout = FlatLayout.of([("w", torch.empty(16, 256)), ("b", torch.empty(1024))])
    pieces, owners = cut(layout, 2048, (1, 0, 3))
    assert owners == (0, 2, 2)
    assert [[(r.start, r.stop, r.decay) for r in piece.regions] for piece in pieces] == [
        [(0, 1280, True)],
        [(1280, 3072, True)],
        [(3072, 4096, True), (4096, 5120, False)],
    ]
    assert cut(FlatLayout.of([]), 1024, (1, 1)) == ((), ())


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_narrow_formats_follow_one_worker(models: dict[str, ModelPlan], moments: str) -> None:
    """bf16 with split masters, and gradients rounded to bf16 on their way through the rings."""
    run = Run(models["llama"], "streamed", "bf16", rate=1e-3, steps=8)
    run = replace(run, streaming={**SMALL, "moments": moments, "gradients": "bf16", "on_card": (0,)})
    for found in run_workers(3, train, run):
        assert worst(found, train_alone(run)) < 3e-3


def test_fp16_skips_what_overflows_on_all_workers(models: dict[str, ModelPlan]) -> None:
    """fp16 keeps working weights apart from the state, and an overflow on one worker is everybody's."""
    run = Run(models["llama"], "streamed", "fp16", steps=14, micro_batch=4, streaming={**SMALL, "on_card": (4,)})
    alone = _fp16(0, 1, run)
    first, second = run_workers(2, _fp16, run)
    assert first == second and first[0] == alone[0] and any(skipped for skipped, _ in first[0])
    assert worst(first[1], alone[1]) < 2e-2


def test_evaluation_and_warm_up_disturb_nothing(models: dict[str, ModelPlan]) -> None:
    run = Run(models["gpt2"], "streamed", steps=6, streaming={**SMALL, "waves": 2})
    alone = _with_evaluations(0, 1, run)
    for found, before, middle in run_workers(3, _with_evaluations, run):
        assert worst(found, alone[0]) < 1e-9
        for mine, theirs in ((before, alone[1]), (middle, alone[2])):
            assert mine[0] == pytest.approx(theirs[0], rel=1e-9) and mine[1] == theirs[1]
    plain = run_workers(3, train, replace(run, steps=3))
    assert run_workers(3, _with_warm_up, replace(run, steps=3)) == plain


def _not_finite(rank: int, workers: int, run: Run) -> Any:
    strategy = start(run, workers)
    advance(strategy, run, 0, 2, rank, workers)
    weight = strategy.state_tensors()["parameter"]["model.layers.1.mlp.up_proj.weight"]
    assert isinstance(weight, torch.Tensor)
    dist.barrier()
    if rank == 1:  # all share it
        saved = weight.clone()
        weight.fill_(float("nan"))
    dist.barrier()
    try:
        advance(strategy, run, 2, 3, rank, workers)
        message = ""
    except NonFiniteError as error:
        message = str(error)
    dist.barrier()
    if rank == 1:
        weight.copy_(saved)
    dist.barrier()
    return message, curve(advance(strategy, run, 2, 6, rank, workers))


def test_what_is_not_finite_stops_all_workers_before_the_update(models: dict[str, ModelPlan]) -> None:
    run = Run(models["llama"], "streamed", "fp32", steps=6, streaming=SMALL)
    expected = run_workers(3, train, run)[0][2:]
    for message, later in run_workers(3, _not_finite, run):
        assert "not finite" in message and later == expected, "the weights were those of before"


def _on_threads(rank: int, workers: int, run: Run, seed: int) -> Any:
    strategy = start(run, workers)
    strategy.executor = Spoiling(strategy, seed + rank)  # type: ignore[attr-defined]
    return curve(advance(strategy, run, 0, run.steps, rank, workers))


class Spoiling:
    """Threads, with NaN in each place right before it is filled: a reader that comes too late, or a writer that comes too
    early, on this worker or another, cannot go unseen."""

    def __init__(self, strategy: Any, seed: int) -> None:
        self._inner, self._strategy = Threads(seed, 0.004), strategy

    def run(self, schedule: Schedule, handler: Handler) -> None:
        def spoiled(op: Op) -> None:
            device, exchange = self._strategy._device, self._strategy._exchange
            with torch.no_grad():
                if op.kind == "fetch":
                    device.slots[op.unit].flat.fill_(float("nan"))
                elif op.kind == "store_part":
                    exchange._ring(device.plan.worker, op).fill_(float("nan"))
                elif op.kind == "fetch_part":
                    exchange._rows(op, index_in(op.writes, "parts")[0]).fill_(float("nan"))
                elif op.kind == "fetch_state":
                    device._staging[index_in(op.writes, "staging")[0]][1].fill_(float("nan"))
            handler(op)

        self._inner.run(schedule, spoiled)


@pytest.mark.parametrize("seed", range(0, 3 * int(os.environ.get("MULETRAIN_TEST_TEAM_SEEDS", "6")), 3))
def test_threads_with_random_delays_give_the_same_bits(models: dict[str, ModelPlan], seed: int) -> None:
    layout = LAYOUTS[seed % len(LAYOUTS)]
    run = Run(models["llama"], "streamed", "fp32", rate=1e-3, steps=3, streaming={**SMALL, **layout})
    assert run_workers(3, _on_threads, run, seed) == run_workers(3, train, run)


def _left_alone(rank: int, workers: int, run: Run, folder: Path) -> None:
    strategy = start(run, workers)
    advance(strategy, run, 0, 2, rank, workers)
    if rank == 1:
        os._exit(9)
    begun = time.monotonic()
    try:
        advance(strategy, run, 2, 20, rank, workers)
    except WorkerFailedError as error:
        (folder / str(rank)).write_text(f"{time.monotonic() - begun} {error}")


def test_without_a_launcher_too_nobody_waits_for_the_dead(models: dict[str, ModelPlan], tmp_path: Path) -> None:
    """As under torchrun: the others notice by themselves, in the middle of a step."""
    with pytest.raises(AssertionError, match="worker 1 died without a word"):
        run_workers(3, _left_alone, Run(models["llama"], "streamed", streaming=SMALL), tmp_path)
    for rank in (0, 2):
        seconds, message = (tmp_path / str(rank)).read_text().split(" ", 1)
        assert float(seconds) < 5 and message == "worker 1 of 3 ended in the middle of a step; so did the others"
