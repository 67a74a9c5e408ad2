"""The streamed engine in all its layouts: waves, inputs on the host, pieces, threads that race, state in narrow formats."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from muletrain.schedule.ops import Schedule, index_in
from muletrain.spec.errors import DoesNotFitError
from muletrain.spec.plan import ModelPlan
from muletrain.strategy.contract import Narrow, NonFiniteError
from muletrain.strategy.stream.arena import HostArena
from muletrain.strategy.stream.executor import Handler, Threads
from tests.strategy.runs import Run, advance, batches_of, curve, start, train_alone, worst

SMALL = {"piece": 4096, "staging": 2}
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"waves": 3},
    {"inputs": "host", **SMALL},
    {"waves": 3, "inputs": "host", "slots": 3, **SMALL},
    {"waves": 2, "slots": 1, "staging": 1, "piece": 2048},
    {"on_card": (0, 2, 4), "inputs": "host", **SMALL},
    {"on_card": (0, 1, 2, 3, 4), "waves": 2},
    {"activations": ("keep", "offload", "recompute")},
    {"activations": ("offload",) * 3, "inputs": "host", **SMALL},
    {"activations": ("offload", "keep", "offload"), "waves": 3, "on_card": (0, 2, 4)},
    {"activations": ("offload",) * 3, "offload_every": 2, "waves": 2},
]
UNCLIPPED: list[dict[str, Any]] = [
    {"update": "in_backward"},
    {"update": "in_backward", "waves": 3, "inputs": "host", **SMALL},
    {"update": "in_backward", "on_card": (0, 2, 4), "slots": 1, **SMALL},
    {"update": "in_backward", "on_card": (0, 1, 2, 3, 4), "waves": 2},
]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_gives_the_resident_bits(models: dict[str, ModelPlan], family: str, layout: dict[str, Any]) -> None:
    """Clipping on, dropout on for GPT-2: with the gradient kept in master precision not one bit differs."""
    run = Run(models[family], compute="fp32", rate=1e-3, steps=6, micro_batch=2)
    assert train_alone(replace(run, strategy="streamed", streaming=layout)) == train_alone(run)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("layout", UNCLIPPED, ids=str)
def test_updates_in_backward_give_the_resident_bits(models: dict[str, ModelPlan], family: str, layout: dict[str, Any]) -> None:
    run = Run(models[family], compute="fp32", rate=1e-3, steps=6, micro_batch=2, clip_norm=0.0)
    assert train_alone(replace(run, strategy="streamed", streaming=layout)) == train_alone(run)


def test_nothing_pends_after_updates_in_backward(models: dict[str, ModelPlan]) -> None:
    run = Run(models["llama"], compute="fp32", rate=1e-3, steps=2, clip_norm=0.0)
    streamed = start(replace(run, strategy="streamed", streaming={"update": "in_backward"}))
    streamed.warm_up(batches_of(0, run, 512)[0])
    resident = start(run)
    for strategy in (streamed, resident):
        advance(strategy, run, 0, 2)
    assert streamed._device.pending is None  # type: ignore[attr-defined]
    found, wanted = streamed.state_tensors(), resident.state_tensors()
    for field in wanted:
        for name, value in wanted[field].items():
            assert torch.equal(found[field][name], value.reshape(found[field][name].shape)), (field, name)


def test_a_loss_that_is_not_finite_updates_nothing_in_backward(models: dict[str, ModelPlan]) -> None:
    run = Run(models["llama"], strategy="streamed", compute="fp32", steps=2, clip_norm=0.0, streaming={"update": "in_backward"})
    strategy = start(run)
    advance(strategy, run, 0, 1)
    units = strategy._device.units  # type: ignore[attr-defined]
    units[4].working[:5] = float("nan")
    before = [unit.working.clone() for unit in units]
    with pytest.raises(NonFiniteError):
        advance(strategy, run, 1, 2)
    for unit, kept in zip(units, before, strict=True):
        assert torch.equal(unit.working, kept) or (unit.number == 4 and torch.equal(unit.working[5:], kept[5:]))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_is_offloaded_leaves_the_card(models: dict[str, ModelPlan], family: str) -> None:
    """Of what a block saved, its weights, input and arguments aside, no more stays on the card than one micro-batch has in
    excess of the one that the room was made for: attention by segments saves more of many documents."""
    run = Run(models[family], strategy="streamed", compute="fp32", steps=1, streaming={"activations": ("offload",) * 3})
    strategy = start(run)
    offload = strategy._device.offload  # type: ignore[attr-defined]
    sent: list[int] = []
    send = offload.send

    def watched(unit: int, micro_batch: int, position: int) -> None:
        send(unit, micro_batch, position)
        saved = offload._calls[unit, micro_batch]
        gone = [tensor.nbytes for tensor, place in zip(saved.tensors, saved.places, strict=True) if place >= 0]
        assert sum(gone) > 0.85 * sum(tensor.nbytes for tensor in saved.tensors)
        assert all(t.device.type == "meta" for t, place in zip(saved.tensors, saved.places, strict=True) if place >= 0)
        sent.append(sum(gone))

    offload.send = watched
    advance(strategy, run, 0, 1)
    block = run.model.shape
    tokens = 2 * 32
    assert len(sent) == 3 * 4 and min(sent) > 4 * tokens * (4 * block.hidden + 2 * block.ffn), "bytes of a micro-batch"


def test_what_finds_no_room_on_the_host_stays_on_the_card(models: dict[str, ModelPlan]) -> None:
    """Experts save more of one micro-batch than of another; the room is made by one."""
    run = Run(models["llama"], strategy="streamed", compute="fp32", steps=2, rate=1e-3)
    few = replace(run, streaming={"activations": ("offload",) * 3})
    strategy = start(few)
    strategy._compute.saved_bytes = lambda *_: 40_000  # type: ignore[attr-defined]
    assert curve(advance(strategy, few, 0, 2)) == train_alone(replace(run, strategy="resident"))


MLA_AND_EXPERTS = {
    "model_type": "deepseek_v2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("layout", LAYOUTS[:4], ids=str)
def test_layers_that_differ_have_slots_by_kind(models: dict[str, ModelPlan], layout: dict[str, Any]) -> None:
    """DeepSeek-V2's first block is dense, the others have experts and all have unequal head sizes: the same bits still."""
    model = models["llama"].model_copy(update={"config": MLA_AND_EXPERTS, "weights": "random"})
    run = Run(model, compute="fp32", rate=1e-3, steps=4)
    streamed = start(replace(run, strategy="streamed", streaming=layout))
    assert len({slot.flat.numel() for slot in streamed._device.slots[1:4]}) == 2  # type: ignore[attr-defined]
    assert curve(advance(streamed, run, 0, 4)) == train_alone(run)


def test_without_clipping_too(models: dict[str, ModelPlan]) -> None:
    run = Run(models["qwen3"], compute="fp32", rate=1e-3, steps=6, clip_norm=0.0)
    assert train_alone(replace(run, strategy="streamed", streaming={"waves": 2})) == train_alone(run)


class Poisoning:
    """Runs on racing threads, and fills a slot or buffer with NaN right before it is loaded: a reader that comes too late or a
    transfer that comes too early cannot go unseen."""

    def __init__(self, strategy: Any, seed: int, delay_s: float) -> None:
        self._inner, self._device = Threads(seed, delay_s), strategy._device

    def run(self, schedule: Schedule, handler: Handler) -> None:
        def poisoned(op: Any) -> None:
            if op.kind == "fetch":
                with torch.no_grad():
                    self._device.slots[op.unit].flat.fill_(float("nan"))
            if op.kind == "receive" and op.piece == 1:
                self._device.offload._ring[index_in(op.writes, "kept")[0]].fill_(255)
            handler(op)

        self._inner.run(schedule, poisoned)


SEEDS = int(os.environ.get("MULETRAIN_TEST_SEEDS", "200"))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_threads_with_random_delays_give_the_same_bits(models: dict[str, ModelPlan], seed: int) -> None:
    """Each resource is a thread; what keeps them in step is the schedule alone."""
    layout = [*LAYOUTS, *UNCLIPPED][seed % (len(LAYOUTS) + len(UNCLIPPED))]
    clip = 0.0 if layout in UNCLIPPED else 1.0
    run = Run(models["llama"], strategy="streamed", compute="fp32", rate=1e-3, steps=3, clip_norm=clip, streaming=layout)
    strategy = start(run)
    strategy.executor = Poisoning(strategy, seed, 0.004)  # type: ignore[attr-defined]
    assert curve(advance(strategy, run, 0, 3)) == train_alone(replace(run, strategy="resident"))


def test_a_thread_that_fails_stops_the_step(models: dict[str, ModelPlan]) -> None:
    run = Run(models["llama"], strategy="streamed", compute="fp32", steps=1)
    strategy = start(run)
    strategy.executor = Threads(0, 0.0)  # type: ignore[attr-defined]
    strategy._device.units[2].working = torch.zeros(3)  # type: ignore[attr-defined]  # the next fetch of it cannot work
    with pytest.raises(RuntimeError, match="size"):
        advance(strategy, run, 0, 1)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_split_masters_give_the_resident_bits(models: dict[str, ModelPlan], family: str, compute: str) -> None:
    """One rule of rounding a master to its working copy, where every weight lies between two bf16 numbers too."""
    run = Run(models[family], compute=compute, rate=1e-3, steps=3, micro_batch=8)
    assert _from_ties(replace(run, strategy="streamed", streaming=SMALL)) == _from_ties(run)


def _from_ties(run: Run) -> list[tuple[float, float]]:
    strategy = start(run)
    for master in strategy.state_tensors()["parameter"].values():
        values = master.whole() if isinstance(master, Narrow) else master
        ties = (values.view(torch.int32) & -0x10000 | 0x8000).view(torch.float32)
        master.write(ties) if isinstance(master, Narrow) else master.copy_(ties)
    strategy.loaded(strategy.state_scalars())
    return curve(advance(strategy, run, 0, 3))


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_bf16_with_split_masters_follows_resident_bf16(models: dict[str, ModelPlan], moments: str) -> None:
    """Narrow moments and gradients: the loss curve stays within a few thousandths of fp32 state."""
    run = Run(models["llama"], compute="bf16", rate=1e-3, steps=8)
    streaming = {"moments": moments, "gradients": "bf16", **SMALL}
    assert worst(train_alone(replace(run, strategy="streamed", streaming=streaming)), train_alone(run)) < 3e-3


def test_fp16_with_units_on_the_card_gives_the_same_bits(models: dict[str, ModelPlan]) -> None:
    """fp16 keeps a working copy beside the split master: on the host or on the card makes no difference."""
    run = Run(models["llama"], strategy="streamed", compute="fp16", rate=1e-3, steps=4, micro_batch=8)
    assert train_alone(replace(run, streaming={"on_card": (0, 2, 4), **SMALL})) == train_alone(run)


def test_a_pending_update_is_applied_before_evaluation(models: dict[str, ModelPlan]) -> None:
    run = Run(models["llama"], compute="fp32", rate=1e-3, steps=2)
    values = []
    for strategy_name in ("resident", "streamed"):
        strategy = start(replace(run, strategy=strategy_name))
        advance(strategy, run, 0, 2)
        values.append(strategy.evaluate(batches_of(99, run, 40)))
    assert values[0] == values[1]


def test_too_little_host_memory_is_said_before_anything_is_loaded() -> None:
    with pytest.raises(DoesNotFitError, match="more than is free on this machine"):
        HostArena(1 << 50, register=False)


def test_an_arena_hands_out_zeroed_arrays_that_do_not_overlap() -> None:
    arena = HostArena(3 * 4096, register=False)
    first, second = arena.take(100, torch.float32), arena.take(5, torch.int16)
    first.fill_(7)
    assert not second.any() and first.dtype == torch.float32 and second.shape == (5,)
    with pytest.raises(ValueError, match="bytes left"):
        arena.take(8000, torch.uint8)
