"""model.adapter, decided: targets and sizes, what is refused, and where the bytes are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from muletrain.catalog.families import model_shape
from muletrain.catalog.models import model_config, model_names
from muletrain.models.build import build_on_meta
from muletrain.planner.adapter import plan_adapter
from muletrain.planner.memory import ledger
from muletrain.planner.resolve import resolve
from muletrain.planner.source import read_model
from muletrain.planner.streamed import traffic_bytes
from muletrain.spec.errors import DoesNotFitError, InputError
from muletrain.spec.plan import AdapterPlan, ModelPlan
from muletrain.spec.recipe import AdapterSection, ModelSection
from tests.families.tiny import tiny_llama
from tests.planner.boxes import GIB, RTX_4090, box, request
from tests.planner.test_memory import RUN, SHAPE, parts

LORA = {"model.adapter.kind": "lora"}


def model_of(name: str) -> ModelPlan:
    return read_model(ModelSection(source=name))[0]


def refused(name: str, **fields: Any) -> str:
    with pytest.raises(InputError) as caught:
        plan_adapter(AdapterSection(kind="lora", **fields), model_of(name), [])
    return str(caught.value)


def test_auto_is_all_linear_layers_and_twice_the_rank_and_says_so() -> None:
    plan = resolve(request(LORA), box(RTX_4090))
    adapter = plan.model.adapter
    assert adapter.targets == ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert (adapter.rank, adapter.alpha) == (16, 32.0)
    # 30 layers of 576: q and o 576 x 576, k and v 576 x 192, gate, up and down 576 x 1,536
    assert adapter.parameters == 30 * 16 * (2 * 1152 + 2 * 768 + 3 * 2112)
    for said in ("model.adapter.targets = q_proj, k_proj", "model.adapter.alpha = 32: twice the rank", "3.63% of the model's"):
        assert any(said in reason for reason in plan.reasons), said
    assert any("for measuring only" in reason for reason in plan.reasons)  # a catalogue shape's weights are random
    assert not any("precision.gradients" in reason for reason in plan.reasons)


def test_without_an_adapter_nothing_is_said_of_one() -> None:
    plan = resolve(request(), box(RTX_4090))
    assert plan.model.adapter == AdapterPlan() and not any("adapter" in reason for reason in plan.reasons)


def test_targets_go_by_the_end_of_a_path_whole_words_only() -> None:
    model = model_of("gpt2")
    both = plan_adapter(AdapterSection(kind="lora", targets=("c_proj",)), model, [])
    one = plan_adapter(AdapterSection(kind="lora", targets=("mlp.c_proj",)), model, [])
    assert both.parameters == 12 * 16 * (2 * 768 + 5 * 768) and one.parameters == 12 * 16 * 5 * 768
    assert "roj is no linear layer" in refused("gpt2", targets=("roj",))


def test_with_experts_auto_is_what_every_block_has() -> None:
    reasons: list[str] = []
    adapter = plan_adapter(AdapterSection(kind="lora"), model_of("deepseek-v2-lite"), reasons)
    assert adapter.targets == ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    assert any("every block has; experts are frozen" in reason for reason in reasons)


def test_a_target_that_matches_nothing_names_the_layers_there_are() -> None:
    said = refused("smollm2-135m", targets=("q_porj", "lm_head"))
    assert "model.adapter.targets: q_porj is no linear layer of a block of smollm2-135m; did you mean q_proj?" in said
    assert "there are self_attn.q_proj, self_attn.k_proj" in said and "lm_head is no linear layer" in said


def test_a_rank_that_no_matrix_can_have_is_refused() -> None:
    said = refused("smollm2-135m", rank=200)
    assert "model.adapter.rank: 200, but self_attn.k_proj is a matrix of 192 x 576" in said and "use 192 or less" in said
    assert plan_adapter(AdapterSection(kind="lora", rank=200, targets=("q_proj",)), model_of("smollm2-135m"), []).rank == 200


def test_a_family_whose_layers_are_not_known_is_refused() -> None:
    model = model_of("smollm2-135m")
    shape = model.shape.model_copy(update={"linears": (), "family": "odd"})
    with pytest.raises(InputError, match=r"model\.adapter\.kind: lora, but the linear layers of odd are not known"):
        plan_adapter(AdapterSection(kind="lora"), model.model_copy(update={"shape": shape}), [])


def test_the_base_is_named_so_that_it_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    plan = plan_adapter(AdapterSection(kind="lora"), model_of("./model"), [])
    assert plan.base == str((tmp_path / "model").resolve())


@pytest.mark.parametrize("name", [name for name in model_names() if model_config(name)["model_type"] != "bert"])
def test_linear_layers_of_the_catalogue_add_up(name: str) -> None:
    """Of dense models, the matrices that a token goes through are the linear layers and the head."""
    shape = model_shape(model_config(name), name)
    matrices = shape.layers * sum(linear.inputs * linear.outputs for linear in shape.linears)
    if shape.linears and not shape.experts:
        assert matrices + shape.vocab * shape.hidden == shape.matmul_parameters


# An adapter of 100 parameters on the model of test_memory.py: 7,000 parameters, 1,000 in each of 4 blocks.
ADAPTER = AdapterPlan(kind="lora", rank=1, alpha=1.0, parameters=100)
ADAPTED = replace(RUN, adapter=ADAPTER)


def states(**changes: Any) -> dict[str, int]:
    run = replace(ADAPTED, **changes)
    place = "host" if run.device == "cpu" else "card"
    return {p: s for p, s in parts(ledger(SHAPE, run), place).items() if p not in ("activations", "logits", "context")}


def test_resident_holds_the_frozen_model_in_the_compute_format_and_no_master_of_it() -> None:
    assert states(compute="bf16") == {"parameters": 2 * 7000, "adapter": (2 + 4 + 4 + 8) * 100}
    assert states(compute="fp32") == {"parameters": 4 * 7000, "adapter": 16 * 100}


def test_zero_shards_the_frozen_model_too() -> None:
    found = states(strategy="zero3", compute="bf16", workers=4)
    assert found == {"parameters": 2 * (2 * 1000 + 3000), "shards": 2 * 7000 // 4, "adapter": 2 * 100 + 16 * 100 // 4}
    assert states(strategy="zero2", compute="bf16", workers=4)["parameters"] == 2 * 7000
    assert states(strategy="zero1", compute="bf16", workers=2)["adapter"] == (2 + 4 + 8) * 100  # gathered, summed, halved


def test_streamed_keeps_two_bytes_a_parameter_on_the_host_and_nothing_else() -> None:
    run = replace(ADAPTED, strategy="streamed", activations="recompute", compute="bf16")
    card = replace(run, streaming=run.streaming.model_copy(update={"inputs": "host", "on_card": (0, 5)}))
    host = parts(ledger(SHAPE, card), "host")
    assert host["parameters"] == 2 * 4000 and not {"state", "gradients", "master", "moments"} & set(host)
    found = parts(ledger(SHAPE, card))
    assert not {"staging", "gradients", "state", "workspace"} & set(found)
    assert found["adapter"] == 16 * 100 + 2 * 2 * 100 // 4
    more = replace(run, streaming=run.streaming.model_copy(update={"inputs": "host", "on_card": (0, 1, 2, 5)}))
    assert parts(ledger(SHAPE, more))["adapter"] == 16 * 100 + 2 * 4 * 100 // 4  # two blocks that stay, two slots
    assert states(strategy="streamed", activations="recompute", compute="bf16", device="cpu") == {
        "parameters": 2 * 7000,
        "adapter": 16 * 100,
        "slots": 2 * 2 * 1000,
    }


def test_streamed_moves_the_blocks_up_and_only_inputs_back() -> None:
    run = replace(ADAPTED, strategy="streamed", activations="recompute", compute="bf16")
    card = replace(run, streaming=run.streaming.model_copy(update={"inputs": "host", "on_card": (0, 5)}))
    inputs = 4 * 6 * 16 * 20 * 2
    # at most once for each wave's forward and once for its backward; the first wave finds nothing on the card
    assert traffic_bytes(SHAPE, card) == (2 * 4000 * 2 + inputs, inputs)


def test_streamed_workers_share_the_frozen_model_and_each_has_the_adapter() -> None:
    run = replace(ADAPTED, strategy="streamed", activations="recompute", compute="bf16", workers=3)
    card = replace(run, streaming=run.streaming.model_copy(update={"inputs": "host", "on_card": (0, 5)}))
    host, one = parts(ledger(SHAPE, card), "host"), parts(ledger(SHAPE, replace(card, workers=1, micro_batches=2)), "host")
    assert host["parameters"] == 2 * 4000 and not {"rings", "gradients", "state"} & set(host)
    assert host["adapter exchange"] == 3 * 4 * 100 and host["inputs"] == 3 * one["inputs"]
    assert parts(ledger(SHAPE, card)) == parts(ledger(SHAPE, replace(card, workers=1, micro_batches=2)))
    assert traffic_bytes(SHAPE, card) == tuple(
        base + more
        for base, more in zip(traffic_bytes(SHAPE, replace(card, workers=1, micro_batches=2)), (1200, 400), strict=True)
    )
    assert states(strategy="streamed", activations="recompute", compute="bf16", device="cpu", workers=3) == {
        "parameters": 2 * 7000,
        "adapter": 3 * 16 * 100,
        "adapter exchange": 3 * 4 * 100,
        "slots": 3 * 2 * 2 * 1000,
    }


def test_dropout_keeps_each_adapters_own_input() -> None:
    shape = model_shape(model_config("smollm2-135m"), "x")
    adapter = ADAPTER.model_copy(update={"targets": ("q_proj", "down_proj"), "rank": 4})
    plain, dropped = (
        parts(ledger(shape, replace(ADAPTED, adapter=adapter.model_copy(update={"dropout": p}))))["activations"]
        for p in (0.0, 0.1)
    )
    assert dropped - plain == shape.layers * 16 * (4 + 1) * (576 + 1536)


def test_32b_in_bf16_fits_a_24_gb_card_and_100_gib_of_host_memory() -> None:
    """The case that this is for: hidden 5,120, 64 layers, rank 16; full training of it does not fit by far."""
    changes = {
        "model.source": "qwen2.5-32b",
        "data.sequence_length": 4096,
        "train.tokens_per_step": 16_384,
        "precision.compute": "bf16",
        "memory.host_limit": 100 * GIB,
        "parallel.workers": 1,
    }
    plan = resolve(request(changes | LORA), box(RTX_4090, host_gib=256))
    assert plan.memory.strategy == "streamed" and plan.memory.streaming.update == "next_fetch"
    host = plan.memory.ledger.total("host")
    assert 2 * 0.8 * plan.model.shape.parameters < host < 70 * GIB
    with pytest.raises(DoesNotFitError):
        resolve(request(changes), box(RTX_4090, host_gib=256))


@pytest.mark.parametrize("name", ["smollm2-135m", "gpt2", "qwen3-0.6b"])
def test_counts_are_those_of_the_built_model(name: str) -> None:
    model = model_of(name)
    adapter = plan_adapter(AdapterSection(kind="lora"), model, [])
    built = build_on_meta(model.model_copy(update={"adapter": adapter}), dtype=torch.bfloat16, loss_chunk=64)
    trained = sum(parameter.numel() for parameter in built.parameters() if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in built.parameters() if not parameter.requires_grad)
    assert (trained, frozen) == (adapter.parameters, model.shape.parameters)


def test_an_unclipped_run_has_no_updates_in_backward_to_speak_of() -> None:
    plan = resolve(request(LORA | {"train.clip_norm": 0.0, "memory.strategy": "streamed"}), box(RTX_4090))
    assert plan.memory.streaming.update == "next_fetch"
    assert not any("updated in backward" in reason for reason in plan.reasons)
