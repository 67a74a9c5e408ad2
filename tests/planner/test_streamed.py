"""Streaming on a card: chosen, laid out as the engine does it, counted by hand and against what was measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
import torch

from muletrain.catalog.families import model_shape
from muletrain.catalog.models import model_config
from muletrain.models.build import build_on_meta
from muletrain.optim.flat import StateFormat, state_bytes
from muletrain.planner.footprint import Footprint
from muletrain.planner.memory import ledger
from muletrain.planner.resolve import resolve
from muletrain.planner.streamed import layouts, stream_plan, traffic_bytes, unit_parameters
from muletrain.precision.policy import precision_of
from muletrain.schedule.build import build
from muletrain.schedule.formats import state_bytes_of
from muletrain.schedule.ops import StepShape
from muletrain.spec.errors import DoesNotFitError, InputError
from muletrain.spec.plan import ModelPlan, Plan, StreamingPlan
from muletrain.spec.recipe import ComputeDtype, OptimizerState
from muletrain.strategy.stream.setup import _units

from .boxes import GIB, H200, RTX_4090, box, request
from .test_memory import SHAPE, parts

CARD = RTX_4090.model_copy(update={"memory_bytes": 24 * GIB})
SEVEN_B = {
    "model.source": "deepseek-llm-7b", "precision.compute": "bf16", "data.sequence_length": 4096, "train.micro_batch": 4,
    "train.tokens_per_step": 65536, "memory.loss_chunk": 4096, "train.optimizer.state": "bf16",
}  # fmt: skip
# 4 blocks of 1,000, an embedding and a head of 100 x 20, a norm of 20; six micro-batches of 16 tokens.
TINY = SHAPE.model_copy(update={"parameters": 8020})
RUN = Footprint(
    strategy="streamed", activations="recompute", compute="bf16", compiled=True, device="cuda", workers=1, micro_batch=2,
    micro_batches=6, sequence_length=8, loss_chunk=5,
    streaming=StreamingPlan(piece=300, inputs="host", on_card=(0, 5), moments="bf16", gradients="bf16"),
)  # fmt: skip


def planned(changes: dict[str, Any], *gpus: Any, host_gib: int = 128) -> Plan:
    return resolve(request(changes), box(*(gpus or (CARD,)), host_gib=host_gib))


@pytest.mark.parametrize(
    ("compute", "moments", "gradients"),
    [
        case
        for case in product(get_args(ComputeDtype), get_args(OptimizerState), ("master", "bf16"))
        if case[0] != "fp64" or case[1] == "fp32"
    ],
)
def test_bytes_of_the_state_are_the_engines(compute: Any, moments: Any, gradients: Any) -> None:
    found, precision = state_bytes_of(compute, moments, gradients), precision_of(compute)
    gradient = precision.master if gradients == "master" else torch.bfloat16
    up, down = state_bytes(StateFormat.of(moments, precision.master, precision.split), gradient)
    assert (found.working, found.master, found.gradient) == (
        precision.compute.itemsize, precision.master.itemsize, gradient.itemsize
    )  # fmt: skip
    assert found.up == up
    assert found.down == down + (2 if compute == "fp16" else 0), "fp16's working copy travels too"


@pytest.mark.parametrize("name", ["deepseek-llm-tiny", "llama-3.2-1b", "qwen3-0.6b", "gpt2"])
def test_units_are_those_the_engine_takes_a_model_apart_into(name: str) -> None:
    config = {**model_config(name)}
    config["n_layer" if name == "gpt2" else "num_hidden_layers"] = 2
    config.pop("layer_types", None)
    shape = model_shape(config, name)
    model = build_on_meta(
        ModelPlan(source=name, config=config, weights="random", shape=shape), dtype=torch.float32, loss_chunk=16
    )
    assert unit_parameters(shape) == tuple(sum(p.numel() for _, p in unit) for unit in _units(model))


def test_tiny_by_hand() -> None:
    found = ledger(TINY, RUN)
    assert unit_parameters(TINY) == (2000, 1000, 1000, 1000, 1000, 2020)
    assert parts(found) == {
        "slots": 2 * (2 * 1000 + 2000 + 2020),
        # A block in four pieces; master 4, moments 4, gradient 2; and a piece's gradient in bf16 each way.
        "staging": 3 * 10 * 250 + 2 * 2 * 250,
        "gradients": 4 * (2 * 1000 + 2000 + 2020),
        "state": 6 * 4020,  # the master's other half and the moments
        "inputs": 2 * 2 * 20 * 96,
        "hidden gradients": 2 * 20 * 96,
        "activations": 2 * 290 * 16,
        "activation gradients": 2 * (3 * 50 + 2 * 20) * 16,
        "workspace": 2 * 1000,  # the block's; the head's is less
        "context": 3 * GIB // 4,
    }
    assert parts(found, "host") == {
        "parameters": 2 * 4000,
        "state": 6 * 4000,
        "gradients": 2 * 4000,
        "inputs": 3 * 2 * 20 * 96,
        "context": 2 * GIB,
    }


def test_tiny_in_other_formats_and_waves() -> None:
    streamed = replace(RUN, streaming=RUN.streaming.model_copy(update={"on_card": (), "waves": 4, "moments": "8bit"}))
    found = ledger(TINY, streamed)
    assert parts(found, "host")["state"] == round((4 + 2 + 2 / 64 - 2) * 8020)
    assert parts(found, "host")["inputs"] == 3 * 2 * 20 * 32, "two of six micro-batches in the largest of four waves"
    assert "state" not in parts(found) and parts(found)["slots"] == parts(ledger(TINY, RUN))["slots"]
    double = parts(ledger(TINY, replace(RUN, compute="fp64", streaming=RUN.streaming.model_copy(update={"moments": "fp32"}))))
    assert (double["gradients"], double["state"]) == (8 * 6020, 16 * 4020)
    assert (double["activation gradients"], double["workspace"]) == (8 * (3 * 50 + 2 * 20) * 16, 8 * 1000)
    wordy = parts(ledger(TINY.model_copy(update={"vocab": 1000, "parameters": 44_020}), RUN))
    assert (wordy["logits"], wordy["workspace"]) == (2 * 5 * 1000, (4 + 2) * 1000 * 20), "the head's is more than the block's"
    half = ledger(TINY, replace(RUN, compute="fp16"))
    assert parts(half, "host")["state"] == 8 * 4000, "fp16 is no half of an fp32 master"
    tied = ledger(TINY.model_copy(update={"tied": True, "parameters": 6020}), RUN)
    assert parts(tied)["tied gradients"] == 6 * 2 * 2000, "each micro-batch of a wave holds one until the embedding's is there"


@pytest.mark.parametrize("waves", [1, 2, 3])
@pytest.mark.parametrize("update", ["next_fetch", "in_backward"])
@pytest.mark.parametrize("on_card", [(), (0, 41), (0, 1, 2, 3, 41)])
def test_traffic_bounds_the_schedules(waves: int, update: str, on_card: tuple[int, ...]) -> None:
    deep = TINY.model_copy(update={"layers": 40, "parameters": 44_020})
    changes = {"waves": waves, "on_card": on_card, "update": update}
    run = replace(RUN, streaming=RUN.streaming.model_copy(update=changes))
    step = StepShape(micro_batches=(16,) * 6, sequence_length=8, pending=update == "next_fetch", mode="train")
    ops = build(stream_plan(deep, run), step).ops
    moved = {way: sum(op.size_bytes for op in ops if op.resource == way) for way in ("up", "down")}
    for most, found in zip(traffic_bytes(deep, run), (moved["up"], moved["down"]), strict=True):
        assert 0.85 * most <= found <= most


@pytest.mark.parametrize(
    ("model", "state", "clip", "blocks", "tokens", "micro_batch", "measured_gib"),
    [
        ("deepseek-llm-7b", "bf16", 0.0, 2, 8_192, 2, 21.1),
        ("deepseek-llm-7b", "bf16", 0.0, 2, 16_384, 4, 21.7),
        ("llama-2-13b", "8bit", 1.0, 3, 32_768, 4, 22.3),
    ],
)
def test_within_5_per_cent_of_what_an_h200_reported(
    model: str, state: Any, clip: float, blocks: int, tokens: int, micro_batch: int, measured_gib: float
) -> None:
    """docs/LOG.md, streamed 6.9 B and 13 B; the driver's figure."""
    shape = model_shape(model_config(model), "x")
    run = replace(
        RUN, micro_batch=micro_batch, micro_batches=tokens // 4096 // micro_batch, sequence_length=4096, loss_chunk=4096
    )
    update = "next_fetch" if clip else "in_backward"
    asked = StreamingPlan(moments=state, gradients="bf16", update=update)
    (layout,) = layouts(shape, asked, blocks)
    found = ledger(shape, replace(run, streaming=layout))
    assert found.total("card") / GIB == pytest.approx(measured_gib, rel=0.05)


def test_7b_on_a_24_gib_card() -> None:
    plan = planned(SEVEN_B)
    assert (plan.memory.strategy, plan.memory.activations, plan.parallel.workers) == ("streamed", "recompute", 1)
    assert plan.memory.streaming == StreamingPlan(
        slots=2, staging=3, piece=2**25, waves=1, inputs="host", on_card=(0, 1, 2, 31), moments="bf16", gradients="bf16"
    )
    host = parts(plan.memory.ledger, "host")
    blocks = 28 * 202_383_360
    assert host["parameters"] + host["state"] + host["gradients"] == 10 * blocks  # 60.7 GB; 8.4 more without on_card
    assert host["inputs"] == 29 * 65536 * 2 * 4096
    assert plan.memory.ledger.total("card") < 0.97 * 24 * GIB
    (why,) = (line for line in plan.reasons if line.startswith("memory.strategy"))
    assert "(resident is 105.1 GiB short); a step moves up to 78.3 GiB to the card and 67.8 GiB back" in why
    for line in ("memory.waves = 1: the fewest transfers", "precision.gradients = bf16: as precision.compute"):
        assert line in plan.reasons


def test_embedding_and_head_stream_where_they_have_no_room() -> None:
    plan = planned(SEVEN_B | {"memory.gpu_limit": 18 * GIB})
    assert plan.memory.streaming.on_card == ()
    assert "memory.placement = 0: embedding and head stream as the blocks do, no room" in plan.reasons
    host = parts(plan.memory.ledger, "host")
    assert host["parameters"] + host["state"] + host["gradients"] == 10 * plan.model.shape.parameters
    assert plan.memory.ledger.total("card") <= 18 * GIB
    with pytest.raises(DoesNotFitError, match=r"on each card and there are 10\.0 GiB"):
        planned(SEVEN_B | {"memory.gpu_limit": 10 * GIB})


def test_blocks_stay_as_the_recipe_asks() -> None:
    fewer = planned(SEVEN_B | {"memory.placement": 0})
    assert fewer.memory.streaming.on_card == (0, 31)
    all_that_fit = planned(SEVEN_B | {"train.tokens_per_step": 16384}).memory.streaming.on_card
    assert all_that_fit[0] == 0 and all_that_fit[1:-1] == tuple(range(1, len(all_that_fit) - 1)) and len(all_that_fit) > 3
    with pytest.raises(DoesNotFitError, match="on each card"):
        planned(SEVEN_B | {"memory.placement": 20})


def test_without_a_clip_blocks_are_updated_in_backward() -> None:
    plan = planned(SEVEN_B | {"train.clip_norm": 0.0})
    assert plan.memory.streaming.update == "in_backward"
    host = parts(plan.memory.ledger, "host")
    assert "gradients" not in host, "summed and used on the card"
    assert any("updated in backward" in line for line in plan.reasons)
    assert planned(SEVEN_B | {"train.clip_norm": 0.0, "precision.compute": "fp16"}).memory.streaming.update == "next_fetch"


def test_blocks_offload_where_the_step_is_faster_so() -> None:
    """Simulated with the catalogue's rates of the card; what is sent is counted on both sides."""
    roomy = planned(SEVEN_B | {"train.micro_batch": 2}, host_gib=256)
    streaming = roomy.memory.streaming
    assert streaming.activations == ("offload",) * 30 and 1 < streaming.offload_every < 16
    assert any("send to the host what backward needs" in line and "faster, simulated" in line for line in roomy.reasons)
    sent = -(-8 // streaming.offload_every) * 8192
    kept = 30 * 2 * (4 * 4096 + 4 * 4096 + 3 * 11008) * sent
    assert parts(roomy.memory.ledger, "host")["activations"] == kept
    assert parts(roomy.memory.ledger)["offload"] == 4 * 2 * (4 * 4096 + 4 * 4096 + 3 * 11008) * 8192
    short = planned(SEVEN_B | {"train.micro_batch": 2, "train.tokens_per_step": 8192}, host_gib=256)
    assert short.memory.streaming.activations == (), "a short step's link is full"
    unknown = RTX_4090.model_copy(update={"name": "NVIDIA Unheard Of", "memory_bytes": 24 * GIB})
    assert planned(SEVEN_B | {"train.micro_batch": 2}, unknown, host_gib=256).memory.streaming.activations == ()


@pytest.mark.parametrize("policy", ["keep", "offload"])
def test_activations_as_the_recipe_asks(policy: str) -> None:
    plan = planned({"memory.strategy": "streamed", "memory.activations": policy, "precision.compute": "bf16"})
    assert plan.memory.streaming.activations == (policy,) * 30
    card, host = parts(plan.memory.ledger), parts(plan.memory.ledger, "host")
    found = ("kept" in card, "offload" in card, "activations" in host)
    assert found == ((True, False, False) if policy == "keep" else (False, True, True))
    with pytest.raises(DoesNotFitError):
        planned(SEVEN_B | {"memory.activations": policy})


def test_13b_needs_narrow_moments_on_a_128_gib_host() -> None:
    thirteen = SEVEN_B | {"model.source": "llama-2-13b", "train.micro_batch": 1, "train.tokens_per_step": 32768}
    eight = planned(thirteen | {"train.optimizer.state": "8bit"})
    assert (eight.memory.strategy, eight.memory.streaming.moments) == ("streamed", "8bit")
    assert eight.memory.ledger.total("host") <= 128 * GIB
    with pytest.raises(DoesNotFitError) as caught:
        planned(thirteen | {"train.optimizer.state": "fp32"})
    message = str(caught.value)
    assert "memory.strategy streamed with activations recompute needs 171.4 GiB on the host and there are 128.0 GiB" in message
    assert "what would fit: train.optimizer.state: bf16; train.optimizer.state: 8bit" in message
    with pytest.raises(DoesNotFitError, match=r"what would fit: train\.optimizer\.state: 8bit; memory\.waves: 2"):
        planned(thirteen, host_gib=122)


def test_advised_waves_do_fit() -> None:
    thirteen = SEVEN_B | {"model.source": "llama-2-13b", "train.micro_batch": 1, "train.tokens_per_step": 32768}
    plan = planned(thirteen | {"memory.waves": 2}, host_gib=122)
    assert plan.memory.streaming.waves == 2
    assert parts(plan.memory.ledger, "host")["inputs"] == 39 * 16384 * 2 * 5120


def test_small_models_stay_resident_and_large_cards_too() -> None:
    assert planned({"precision.compute": "bf16"}).memory.strategy == "resident"
    seven = {key: value for key, value in SEVEN_B.items() if key != "train.optimizer.state"}
    assert planned(seven, H200).memory.strategy == "resident"


def test_several_cards_stream_where_sharding_does_not_fit() -> None:
    """A 7 B model on two 24 GB cards: zero3 misses by far; streamed holds the state once, whatever the number of cards."""
    seven = {key: value for key, value in SEVEN_B.items() if key != "train.optimizer.state"}
    two, one = planned(seven, CARD, CARD), planned(seven, CARD)
    assert (two.memory.strategy, two.parallel.workers, two.memory.streaming.slices) == ("streamed", 2, (1, 1))
    assert two.memory.streaming.update == "next_fetch"
    (host, alone) = ({i.part: i.size_bytes for i in p.memory.ledger.items if i.place == "host"} for p in (two, one))
    on_card = [len(p.memory.streaming.on_card) for p in (two, one)]
    assert on_card[0] == on_card[1], "then what is on the host is the same"
    assert host["state"] == alone["state"] and host["parameters"] == alone["parameters"]
    assert host["rings"] > 0 and "rings" not in alone
    asked = seven | {"memory.strategy": "streamed"}
    assert planned(asked, CARD, CARD).parallel.workers == 2


def test_what_only_streamed_does_is_refused_elsewhere() -> None:
    keys = {"train.optimizer.state": "8bit", "precision.gradients": "bf16", "memory.waves": 2}
    with pytest.raises(InputError) as caught:
        planned(keys, H200)
    assert [problem.partition(": ")[0] for problem in caught.value.problems] == list(keys)
    for problem in caught.value.problems:
        assert "memory.strategy: auto chose resident; set memory.strategy: streamed, or remove" in problem
    with pytest.raises(InputError, match=r"8bit is for memory\.strategy: streamed alone, and memory\.strategy is zero3"):
        planned({"train.optimizer.state": "8bit", "memory.strategy": "zero3"}, H200)


def test_gradients_follow_compute_unless_asked() -> None:
    streamed = {"memory.strategy": "streamed"}
    for compute, asked, found in [
        ("bf16", "auto", "bf16"), ("bf16", "fp32", "master"), ("fp16", "auto", "master"), ("fp32", "bf16", "bf16"),
    ]:  # fmt: skip
        plan = planned(streamed | {"precision.compute": compute, "precision.gradients": asked})
        assert plan.memory.streaming.gradients == found
        assert any(line.startswith("precision.gradients") for line in plan.reasons) == (asked == "auto")


def test_on_a_cpu_the_layout_is_plain() -> None:
    plan = resolve(request({"memory.strategy": "streamed", "train.optimizer.state": "8bit"}), box())
    assert plan.memory.streaming == StreamingPlan(moments="8bit")
    assert parts(plan.memory.ledger, "host")["moments"] == round((2 + 2 / 64) * plan.model.shape.parameters)


def test_pieces_are_no_larger_than_the_largest_unit() -> None:
    plan = planned({"model.source": "smollm2-135m", "memory.strategy": "streamed"})
    assert plan.memory.streaming.piece == 49152 * 576


def test_a_step_of_absurd_length_is_planned_at_once() -> None:
    with pytest.raises(DoesNotFitError):
        planned(SEVEN_B | {"train.tokens_per_step": 10**12, "train.micro_batch": 1})
