"""Training an adapter beside a frozen model: the same answer under every strategy and split, and the model never moves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from muletrain.models.lora import matrix_of
from muletrain.planner.adapter import plan_adapter
from muletrain.planner.memory import ledger
from muletrain.planner.prediction import footprint
from muletrain.planner.source import read_model
from muletrain.spec.plan import ModelPlan
from muletrain.spec.recipe import AdapterSection, ModelSection
from muletrain.strategy.stream.executor import Threads
from muletrain.strategy.stream.strategy import StreamedStrategy
from tests.dist.workers import run_workers
from tests.families.tiny import tiny_gpt2, tiny_llama
from tests.strategy.runs import Run, advance, curve, plan_of, start, train, train_alone, worst
from tests.strategy.stream.test_engine import MLA_AND_EXPERTS

FAMILIES = ["llama", "gpt2"]
DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


def adapted(folder: Path, **fields: Any) -> ModelPlan:
    """The folder's model with an adapter on all linear layers."""
    model, _ = read_model(ModelSection(source=str(folder)))
    section = AdapterSection(kind="lora", **{"rank": 4, "dropout": 0.1, **fields})
    return model.model_copy(update={"adapter": plan_adapter(section, model, [])})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelPlan]:
    """By family, dropout in the adapter and, in GPT-2, in the model too."""
    folder: Path = tmp_path_factory.mktemp("adapted")
    return {
        "llama": adapted(tiny_llama(folder / "llama", num_hidden_layers=3)),
        "gpt2": adapted(tiny_gpt2(folder / "gpt2", n_layer=3, **DROPOUT), targets=("c_attn", "mlp.c_proj"), rslora=True),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_one_worker_same_micro_batches_bit_equal(models: dict[str, ModelPlan], family: str) -> None:
    """20 steps, dropout on, every way to hold the frozen weights."""
    base = Run(models[family], compute="fp32", rate=1e-2)
    resident = train_alone(base)
    assert resident[-1][0] < resident[0][0]
    assert train_alone(replace(base, strategy="streamed", streaming={"waves": 3, "inputs": "host"})) == resident
    [sharded] = run_workers(1, train, replace(base, strategy="zero3"))
    assert sharded == resident


@pytest.mark.parametrize("compute", ["fp64", "bf16", "fp16"])
def test_few_steps_in_other_formats_and_layouts(models: dict[str, ModelPlan], compute: str) -> None:
    """FSDP rounds a gradient to 16 bits where the others do not, so in those formats it is only close."""
    base = Run(models["llama"], compute=compute, rate=1e-2, steps=4)
    resident = train_alone(base)
    assert train_alone(replace(base, activations="recompute")) == resident
    layouts = ({}, {"on_card": (0, 2, 4)}, {"activations": ("offload", "keep", "recompute"), "waves": 2, "inputs": "host"})
    for streaming in layouts:
        assert train_alone(replace(base, strategy="streamed", streaming=streaming)) == resident
    for strategy in ("zero1", "zero2"):
        [sharded] = run_workers(1, train, replace(base, strategy=strategy))
        assert sharded == resident if compute == "fp64" else worst(sharded, resident) < 0.01


@pytest.mark.parametrize("strategy", ["resident", "streamed"])
def test_a_skipped_step_leaves_the_adapter_as_it_is(models: dict[str, ModelPlan], strategy: str) -> None:
    """fp16 with a loss scale that overflows: nothing moves, the scale is halved."""
    run = Run(models["llama"], strategy=strategy, compute="fp16", micro_batch=8)
    engine = start(run)
    engine.loaded({"scale": 2.0**30, "good": 0})
    before = {name: tensor.clone() for name, tensor in engine.full_parameters()}
    [first] = advance(engine, run, 0, 1)
    assert first.skipped and first.loss_scale == 2.0**30
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.full_parameters())
    results = advance(engine, run, 1, 20)
    assert not results[-1].skipped and results[-1].loss_scale < 2.0**30


FP64, FP32 = ("fp64", 3e-3, 1e-6), ("fp32", 1e-3, 1e-5)
SPLITS = [
    ("resident", 2, 2, *FP64),
    ("resident", 3, 1, *FP32),
    ("zero1", 2, 1, *FP64),
    ("zero2", 3, 2, *FP32),
    ("zero3", 2, 2, *FP64),
    ("zero3", 3, 4, *FP32),
    ("streamed", 1, 8, *FP64),
    ("streamed", 2, 2, *FP64),
    ("streamed", 3, 1, *FP32),
]


@pytest.mark.parametrize(("strategy", "workers", "micro_batch", "compute", "rate", "bound"), SPLITS)
def test_any_split_gives_the_same_losses_and_norms(
    models: dict[str, ModelPlan], strategy: str, workers: int, micro_batch: int, compute: str, rate: float, bound: float
) -> None:
    """Without dropout where micro-batches differ, since they are what dropout is keyed by."""
    model = models["llama"]
    if micro_batch != 2:
        model = model.model_copy(update={"adapter": model.adapter.model_copy(update={"dropout": 0.0})})
    base = Run(model, compute=compute, rate=rate, micro_batch=2)
    expected = train_alone(base)
    for result in run_workers(workers, train, replace(base, strategy=strategy, micro_batch=micro_batch)):
        assert worst(result, expected) < bound


@pytest.mark.parametrize("seed", range(5))
def test_racing_threads_give_the_same_bits(models: dict[str, ModelPlan], seed: int) -> None:
    run = Run(models["llama"], compute="fp32", steps=3, strategy="streamed", streaming={"waves": 2, "inputs": "host"})
    expected = train_alone(run)
    strategy = start(run)
    assert isinstance(strategy, StreamedStrategy)
    strategy.executor = Threads(seed, 0.002)
    assert curve(advance(strategy, run, 0, 3)) == expected


def _all_values(strategy: Any) -> dict[str, torch.Tensor]:
    """Every value that the model computes with, trained or not, by name."""
    if isinstance(strategy, StreamedStrategy):
        units = strategy._built.device.units
        return {name: view.clone() for unit in units for name, view in unit.layout.views(unit.working).items()}
    values = {}
    for name, parameter in strategy._model.hf.named_parameters():
        value = parameter.detach()
        values[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return values


def _moved(rank: int, workers: int, run: Run) -> tuple[set[str], set[str]]:
    strategy = start(run, workers)
    before, trained = _all_values(strategy), {name: t.clone() for name, t in strategy.full_parameters()}
    advance(strategy, run, 0, 2, rank, workers)
    after, trained_after = _all_values(strategy), dict(strategy.full_parameters())
    frozen = {name for name in before if matrix_of(name) is None}
    assert all(torch.equal(before[name], after[name]) for name in frozen)
    return frozen, {name for name in trained if not torch.equal(trained[name], trained_after[name])}


@pytest.mark.parametrize("strategy", ["resident", "zero3", "streamed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_adapter_moves_and_has_state(models: dict[str, ModelPlan], family: str, strategy: str) -> None:
    """After two steps (B is zero at first, so A moves from the second on) every matrix has moved and no base weight has."""
    run = Run(models[family], strategy=strategy, compute="bf16", rate=1e-2)
    [(frozen, moved)] = run_workers(1, _moved, run) if strategy == "zero3" else [_moved(0, 1, run)]
    shape, adapter = run.model.shape, run.model.adapter
    assert len(moved) == 2 * shape.layers * len(shape.adapted(adapter.targets)) and not moved & frozen
    if strategy != "zero3":
        state = start(run).state_tensors()
        assert all(set(tensors) == moved for tensors in state.values())
        assert sum(tensor.shape.numel() for tensor in state["parameter"].values()) == adapter.parameters


def test_blocks_that_differ(tmp_path: Path) -> None:
    """DeepSeek-V2: a dense block, then blocks with experts; the adapters are on attention, whose parts are alike."""
    (tmp_path / "config.json").write_text(json.dumps(MLA_AND_EXPERTS))
    model = adapted(tmp_path)
    run = Run(model, compute="fp32", rate=1e-2, steps=3)
    expected = train_alone(run)
    assert train_alone(replace(run, strategy="streamed", streaming={"waves": 2, "on_card": (0, 1, 4)})) == expected
    assert expected[-1][0] < expected[0][0]


def _bytes(tensors: Any) -> int:
    """Of tensors that share no memory."""
    whole = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(whole.values())


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_the_ledger_is_what_was_built(models: dict[str, ModelPlan], compute: str) -> None:
    """Arrays start at 256 elements, and buffers that no parameter is are not counted."""
    run = Run(models["llama"], compute=compute)
    shape, padding = run.model.shape, 256 * 4 * 4 * (len(run.model.adapter.targets) * 2 + 9) * run.model.shape.layers
    resident: Any = start(run)
    states = [t for s in resident._states for t in (s.master, s.exp_avg, s.exp_avg_sq)]
    built = _bytes([p.detach() for p in resident._model.parameters()] + states + resident._sums._flats)
    planned = ledger(shape, replace(footprint(plan_of(run)), device="cuda")).items
    assert built == sum(item.size_bytes for item in planned if item.part in ("parameters", "adapter"))
    streamed: Any = start(replace(run, strategy="streamed"))
    device, adapter = streamed._built.device, streamed._built.device.adapter
    frozen = sum(unit.working.nbytes for unit in device.units)
    held = _bytes([*adapter.unit.state.tensors(), adapter._gradient, adapter.unit.working])
    in_slots = sum(slot.flat.nbytes for slot in {id(slot): slot for slot in device.slots[1:-1]}.values())
    planned = ledger(shape, replace(footprint(plan_of(replace(run, strategy="streamed"))), device="cpu")).items
    parts = {item.part: item.size_bytes for item in planned}
    for size, part in ((frozen, "parameters"), (held, "adapter"), (in_slots, "slots")):
        assert parts[part] <= size <= parts[part] + padding, part


def test_the_frozen_base_is_in_the_models_dtype_everywhere(models: dict[str, ModelPlan]) -> None:
    """bf16 base: two bytes a parameter on the host, and nothing else of it anywhere."""
    run = Run(models["llama"], compute="bf16", strategy="streamed")
    strategy = start(run)
    assert isinstance(strategy, StreamedStrategy)
    [arena] = strategy._built.arenas
    frozen, pages = run.model.shape.parameters, 4096 * len(strategy._built.device.units)
    assert 2 * frozen <= arena._size <= 2 * frozen + pages + 512 * 40  # arrays start at pages, parameters at 256 elements
    assert not strategy._built.device._gradients
    assert all(state.master.hi.numel() == 0 for state, _ in strategy._built.device._staging)  # type: ignore[union-attr]
