"""What the train loop may rely on, under every strategy: evaluation disturbs nothing, state moves between strategies, a value
that is not finite stops or skips before any update, filler and empty batches train nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from muletrain.data.batch import IGNORE
from muletrain.spec.plan import ModelPlan
from muletrain.strategy.contract import Narrow, NonFiniteError, StepContext, Strategy
from tests.dist.workers import run_workers
from tests.strategy.runs import Run, advance, batches_of, curve, replace_value, start, train, train_alone, worst

EVERY = ["resident", "zero1", "zero2", "zero3", "streamed"]


def on(strategy: str, function: Any, *args: Any) -> Any:
    """function(rank, workers, *args) where `strategy` can run with one worker."""
    return run_workers(1, function, *args)[0] if strategy.startswith("zero") else function(0, 1, *args)


def _with_evaluations(rank: int, workers: int, run: Run) -> Any:
    strategy = start(run, workers)
    batches = batches_of(900, run, run.model.config["vocab_size"], rank, workers)
    before = strategy.evaluate(batches)
    results = advance(strategy, run, 0, 3, rank, workers)
    middle = strategy.evaluate(batches)
    assert strategy.evaluate(batches) == middle
    results += advance(strategy, run, 3, 6, rank, workers)
    return curve(results), before, middle


@pytest.mark.parametrize("strategy", EVERY)
def test_E05_evaluation_changes_nothing(models: dict[str, ModelPlan], strategy: str) -> None:
    """With dropout on: losses of a run with evaluations in between are those of a run without."""
    run = Run(models["gpt2"], strategy=strategy, compute="fp32", rate=1e-3, steps=6)
    evaluated, before, middle = on(strategy, _with_evaluations, run)
    assert evaluated == on(strategy, train, run)
    assert middle[0] < before[0] and middle[1] == before[1] > 0


@pytest.mark.parametrize("workers", [2, 3])
def test_evaluation_is_the_same_for_any_number_of_workers(models: dict[str, ModelPlan], workers: int) -> None:
    run = Run(models["gpt2"], strategy="zero2", steps=6)
    alone = _with_evaluations(0, 1, replace(run, strategy="resident"))
    for _, before, middle in run_workers(workers, _with_evaluations, run):
        assert before[0] == pytest.approx(alone[1][0], rel=1e-12) and before[1] == alone[1][1]
        assert middle[0] == pytest.approx(alone[2][0], rel=1e-9)


def _with_warm_up(rank: int, workers: int, run: Run) -> Any:
    strategy = start(run, workers)
    strategy.warm_up(batches_of(50, run, run.model.config["vocab_size"])[0])
    return curve(advance(strategy, run, 0, run.steps, rank, workers))


@pytest.mark.parametrize("strategy", EVERY)
def test_warm_up_is_forgotten(models: dict[str, ModelPlan], strategy: str) -> None:
    run = Run(models["llama"], strategy=strategy, compute="fp32", steps=3)
    assert on(strategy, _with_warm_up, run) == train_alone(replace(run, strategy="resident"))


def snapshot(strategy: Strategy) -> dict[str, dict[str, torch.Tensor]]:
    """Whole copies of the training state."""
    whole = {}
    for kind, tensors in strategy.state_tensors().items():
        whole[kind] = {name: _whole(tensor) for name, tensor in tensors.items()}
    return whole


def _whole(tensor: torch.Tensor | Narrow) -> torch.Tensor:
    if isinstance(tensor, Narrow):
        return tensor.whole()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def _half(rank: int, workers: int, run: Run) -> Any:
    strategy = start(run, workers)
    first = curve(advance(strategy, run, 0, 5, rank, workers))
    state = {kind: {n: t.numpy() for n, t in tensors.items()} for kind, tensors in snapshot(strategy).items()}
    return first, state, strategy.state_scalars()


def _other_half(rank: int, workers: int, run: Run, state: Any, scalars: Any) -> Any:
    strategy = start(replace(run, seed=run.seed), workers)
    for kind, tensors in strategy.state_tensors().items():
        for name, tensor in tensors.items():
            whole = torch.from_numpy(state[kind][name])
            if isinstance(tensor, DTensor):
                size, offset = -(-whole.shape[0] // workers), rank * -(-whole.shape[0] // workers)
                tensor.to_local().copy_(whole[offset : offset + size])
            elif isinstance(tensor, Narrow):
                tensor.write(whole)
            else:
                tensor.copy_(whole)
    strategy.loaded(scalars)
    return curve(advance(strategy, run, 5, 10, rank, workers))


@pytest.mark.parametrize(
    ("one", "other", "workers"), [("zero3", "resident", 1), ("resident", "streamed", 1), ("streamed", "zero1", 3)]
)
def test_state_moves_between_strategies(models: dict[str, ModelPlan], one: str, other: str, workers: int) -> None:
    run = Run(models["qwen3"], strategy=one, steps=10)
    first, state, scalars = on(one, _half, run)
    second_run = replace(run, strategy=other)
    second = (
        run_workers(workers, _other_half, second_run, state, scalars)[0]
        if workers > 1
        else on(other, _other_half, second_run, state, scalars)
    )
    assert worst(first + second, train_alone(replace(run, strategy="resident"))) < 1e-9


def _poisoned(rank: int, workers: int, run: Run) -> Any:
    strategy = start(run, workers)
    advance(strategy, run, 0, 2, rank, workers)
    before = snapshot(strategy)
    weight = list(strategy.state_tensors()["parameter"].values())[1]
    assert isinstance(weight, torch.Tensor)
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    saved = local.clone()
    if rank == workers - 1:
        local.fill_(float("nan"))  # on one worker only: all must hear of it
    strategy.loaded(strategy.state_scalars())
    message = ""
    try:
        advance(strategy, run, 2, 3, rank, workers)
    except NonFiniteError as error:
        message = str(error)
    local.copy_(saved)
    after = snapshot(strategy)
    same = all(torch.equal(before[k][n], after[k][n]) for k in before for n in before[k])
    return message, same


@pytest.mark.parametrize(
    ("strategy", "workers"), [("resident", 1), ("streamed", 1), ("zero1", 2), ("zero3", 2), ("resident", 2)]
)
def test_N03_N04_not_finite_stops_all_workers_before_the_update(
    models: dict[str, ModelPlan], strategy: str, workers: int
) -> None:
    run = Run(models["llama"], strategy=strategy, compute="fp32", steps=4)
    results = run_workers(workers, _poisoned, run) if strategy != "streamed" else [_poisoned(0, 1, run)]
    for message, unchanged in results:
        assert "not finite" in message
        assert unchanged


def _fp16(rank: int, workers: int, run: Run) -> Any:
    strategy = start(run, workers)
    strategy.loaded({"scale": 2.0**30, "good": 0})  # far too high: the first steps overflow
    results = advance(strategy, run, 0, 14, rank, workers)
    return [(r.skipped, r.loss_scale) for r in results], curve([r for r in results if not r.skipped])


@pytest.mark.parametrize("strategy", ["resident", "zero3", "streamed"])
def test_N02_N11_fp16_overflow_skips_and_halves_until_it_fits(models: dict[str, ModelPlan], strategy: str) -> None:
    """Skipped steps are the same under every strategy; the norm of the others is unscaled."""
    run = Run(models["llama"], strategy=strategy, compute="fp16", steps=14, micro_batch=8)
    verdicts, applied = on(strategy, _fp16, run)
    skips = [skipped for skipped, _ in verdicts]
    assert skips[0] and not skips[-1]
    assert skips == sorted(skips, reverse=True)
    scales = [scale for _, scale in verdicts]
    assert scales[: sum(skips) + 1] == [2.0 ** (30 - n) for n in range(sum(skips) + 1)]
    reference = train_alone(replace(run, strategy="resident", compute="fp32", steps=14))
    assert applied[0][1] == pytest.approx(reference[0][1], rel=0.2)


def _with_nothing_to_learn(rank: int, workers: int, run: Run) -> Any:
    strategy = start(run, workers)
    before = snapshot(strategy)
    batches = [replace_value(b, labels=torch.full_like(b.labels, IGNORE), tokens=0) for b in batches_of(0, run, 100)]
    result = strategy.step(batches, StepContext(0, 0, 1e-3))
    after = snapshot(strategy)
    return result, all(torch.equal(before[k][n], after[k][n]) for k in before for n in before[k])


@pytest.mark.parametrize("strategy", EVERY)
def test_N14_a_step_without_labels_changes_nothing(models: dict[str, ModelPlan], strategy: str) -> None:
    result, same = on(strategy, _with_nothing_to_learn, Run(models["llama"], strategy=strategy, compute="fp32"))
    assert same and result.skipped and result.tokens == 0 and result.norm == 0.0


def _filled(rank: int, workers: int, run: Run, filler: int) -> Any:
    strategy = start(run, workers)
    batches = batches_of(0, run, 100)
    result = strategy.step(batches + [batches[0].filler()] * filler, StepContext(0, 0, 1e-3))
    return result.loss_sum, result.tokens, result.norm


@pytest.mark.parametrize("strategy", EVERY)
def test_N14_filler_adds_exactly_nothing(models: dict[str, ModelPlan], strategy: str) -> None:
    run = Run(models["llama"], strategy=strategy, compute="fp32")
    assert on(strategy, _filled, run, 2) == on(strategy, _filled, run, 0)


def _names(rank: int, workers: int, run: Run) -> Any:
    strategy = start(run, workers)
    whole = [(name, tuple(t.shape)) for name, t in strategy.full_parameters()]
    state = strategy.state_tensors()
    return whole, {kind: list(tensors) for kind, tensors in state.items()}, dist.is_initialized()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_names_and_shapes_are_hugging_faces_under_every_strategy(models: dict[str, ModelPlan], family: str) -> None:
    expected, state, _ = _names(0, 1, Run(models[family]))
    assert state == {kind: [name for name, _ in expected] for kind in ("parameter", "exp_avg", "exp_avg_sq")}
    assert any("layers.0." in name or "h.0." in name for name, _ in expected)
    for strategy in EVERY[1:]:
        whole, kinds, _ = on(strategy, _names, Run(models[family], strategy=strategy, activations="recompute"))
        assert whole == expected and kinds == state
