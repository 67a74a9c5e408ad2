"""Memory of any trainer's step, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from muletrain.planner.assumptions import Assumptions
from muletrain.planner.job import EIGHT_BIT, FP32_PARAMETERS, MEGATRON, MIXED, PURE, Job
from muletrain.planner.job_memory import (
    activation_bytes,
    allocated_bytes,
    block_numbers,
    device_bytes,
    host_parts,
    job_ledger,
    logits_bytes,
    needed_bytes,
    reserved_bytes,
)

from .jobs import SHAPE, STATES, job

A = replace(
    Assumptions(), reserved=1.5, reserved_varied=3.0, eager_activations=1.5, context_bytes=1000, communication_bytes=100
)


def parts(found: Job, place: str = "card") -> dict[str, int]:
    return {item.part: item.size_bytes for item in job_ledger(found, A).items if item.place == place}


def test_bytes_a_parameter_of_each_format() -> None:
    assert [each.trained for each in (MIXED, FP32_PARAMETERS, MEGATRON, PURE, EIGHT_BIT)] == [16, 16, 18, 8, 6]


def test_one_card_before_the_last_backward() -> None:
    found = parts(job())
    assert found["parameters"] == 2 * 7000
    assert found["master"] == 5 * 7000
    assert found["moments"] == 7 * 7000
    assert found["gradients"] == 3 * 7000
    assert found["activations"] == 4 * 290 * 2 * 8
    assert found["logits"] == 11 * 8 * 100
    assert found["context"] == 1000


def test_the_update_needs_more_when_its_workspace_is_larger_than_activations() -> None:
    found = parts(job(update_workspace=9.0))
    assert found["workspace"] == 9 * 7000
    assert "activations" not in found
    assert "fragmentation" not in found


def test_gradients_of_a_single_micro_batch_appear_while_activations_go() -> None:
    assert parts(job(micro_batches=1))["gradients"] == 3 * 7000 - 4 * 290 * 2 * 8
    assert "gradients" not in parts(job(micro_batches=1, micro_batch=20, formats=replace(STATES, master=0, moments=0)))


def test_zero1_shards_masters_and_moments() -> None:
    found = parts(job(cards=4, shard="zero1"))
    assert (found["master"], found["moments"]) == (5 * 7000 / 4, 7 * 7000 / 4)
    assert (found["parameters"], found["gradients"]) == (2 * 7000, 3 * 7000)
    assert found["context"] == 1100


def test_zero2_shards_gradients_and_holds_one_unit_whole() -> None:
    found = parts(job(cards=4, shard="zero2"))
    assert found["gradients"] == 3 * 7000 / 4 + 3 * 3000
    assert parts(job(cards=4, shard="zero1", sharded_gradients=True))["gradients"] == found["gradients"]
    assert parts(job(cards=4, shard="zero2", deepspeed=True))["buckets"] == 2e9


def test_zero3_gathers_two_blocks_and_what_is_outside() -> None:
    found = parts(job(cards=4, shard="zero3"))
    assert found["parameters"] == 2 * 7000 / 4
    assert found["gathered"] == 2 * (2 * 1000 + 3000)
    assert found["gradients"] == 3 * 7000 / 4 + 3 * 3000
    assert parts(job(cards=4, shard="zero3", deepspeed=True))["gathered"] == 2 * 7000  # all of it: less than a billion
    assert "gathered" not in parts(job(shard="zero3"))


def test_no_sync_keeps_whole_gradients_over_micro_batches() -> None:
    both = {"cards": 4, "shard": "zero3", "whole_gradients": True}
    assert parts(job(**both))["gradients"] == 3 * 7000 + 3 * 3000
    sharded = max(0, 3 * 7000 / 4 - 4 * 290 * 2 * 8) + 3 * 3000
    assert parts(job(**both, micro_batches=1))["gradients"] == sharded


def test_update_in_backward_holds_one_units_gradient() -> None:
    assert parts(job(update_in_backward=True))["gradients"] == 3 * 3000


def test_sharding_over_a_part_of_the_cards() -> None:
    assert parts(job(cards=8, shard="zero1", shard_over=2))["master"] == 5 * 7000 / 2


def test_tensor_and_pipeline_cut_weights_and_activations() -> None:
    found = parts(job(cards=8, tensor=2, pipeline=2, micro_batches=8))
    assert found["parameters"] == 2 * 7000 / 4
    # two of four blocks, two micro-batches in flight, half of each block's width
    assert found["activations"] == 290 * 2 * 8 / 2 * 2 * 2
    assert found["logits"] == 11 * 8 * 100 / 2
    assert job(cards=8, tensor=2, pipeline=2).data_parallel == 2
    assert parts(job(cards=2, context=2))["activations"] == 4 * 290 * 2 * 4


def test_loading_the_whole_model_first() -> None:
    found = parts(job(cards=2, shard="zero3", loaded_whole=True, formats=replace(PURE, working=20.0)))
    assert found["parameters"] == 20 * 7000 / 2
    assert found["gathered"] == 20 * 7000
    assert found["copies"] == 2 * 2 * 3000


@pytest.mark.parametrize(
    ("changes", "held", "block"),
    [
        ({}, 290 * 2 * 8 * 4, 0),
        ({"kept_share": 0.5}, 290 * 8 * 4, 290 * 2 * 8),
        ({"policy": "recompute"}, 2 * 20 * 8 * 4, 290 * 2 * 8),
        ({"policy": "selective"}, 2 * (40 + 40 + 10 + 50) * 8 * 4, 290 * 2 * 8),
        ({"policy": "recompute", "offload": frozenset({"activations"})}, 0, 290 * 2 * 8),
        ({"kernels": "eager"}, 1.5 * 290 * 2 * 8 * 4, 0),
        ({"kernels": "eager", "shape": SHAPE.model_copy(update={"gated": False})}, (7 / 6) * 240 * 2 * 8 * 4, 0),
        ({"flash": False}, (290 * 2 + 4 * 2 * 4) * 8 * 4, 0),
        ({"kernels": "eager", "flash": False}, (1.5 * 290 * 2 + 8 * 2 * 4) * 8 * 4, 0),
        ({"rank": 3, "trained": 10}, (290 * 2 + 7 * 2 * 3) * 8 * 4, 0),
        ({"rank": 3, "trained": 10, "kernels": "eager"}, (1.5 * 580 + 7 * 2 * (3 + (60 + 25) / 3.5)) * 8 * 4, 0),
        ({"matmul": "fp8", "kernels": "written"}, (290 - (40 + 20 + 50) / 2) * 2 * 8 * 4, 0),
    ],
)
def test_activations(changes: dict[str, Any], held: float, block: float) -> None:
    assert activation_bytes(job(**changes), A) == pytest.approx((held, block))


def test_numbers_of_a_block() -> None:
    # 4 x 20 + 20 + 20 + 2 x 10 + 3 x 50
    assert block_numbers(job()) == 290
    latent = SHAPE.model_copy(update={"value_dim": 4, "latent": 6})
    assert block_numbers(job(shape=latent)) == 4 * 20 + 20 + 8 + 14 + 150 + 12


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 11 * 8 * 100),
        ({"kernels": "eager"}, 16 * 8 * 100),
        ({"kernels": "eager", "logit_bytes": 10.0}, 10 * 8 * 100),
        ({"fused_loss": True}, 2 * 8 * 100),
        ({"loss_chunks": 4}, 11 * 2 * 100),
        ({"kernels": "eager", "loss_chunks": 4, "tensor": 2}, 16 * 100),
    ],
)
def test_M06_logits_are_counted(changes: dict[str, Any], size: float) -> None:
    assert logits_bytes(job(**changes), A) == size


def test_M06_a_large_vocabulary_is_the_largest_part_and_chunks_take_it_away() -> None:
    wide = SHAPE.model_copy(update={"vocab": 152_000})
    found = parts(job(shape=wide, sequence=4096, micro_batch=1, policy="recompute", kernels="eager"))
    assert found["logits"] == 16 * 4096 * 152_000
    assert max(found, key=lambda part: found[part]) == "logits"
    assert logits_bytes(job(shape=wide, sequence=4096, micro_batch=1, loss_chunks=16, fused_loss=True), A) == 2 * 256 * 152_000


def test_a_recomputed_block_and_logits_are_never_there_together() -> None:
    found = parts(job(policy="recompute"))
    assert found["activations"] == 2 * 20 * 8 * 4  # a block of 4,640 bytes is less than 8,800 of logits
    assert parts(job(policy="recompute", fused_loss=True))["activations"] == 2 * 20 * 8 * 4 + 4640 - 1600


def test_adapters_leave_the_model_frozen() -> None:
    found = parts(job(trained=100, rank=2))
    assert found["parameters"] == 1 * 4000 + 4 * 3000 + 2 * 100
    assert (found["master"], found["moments"], found["gradients"]) == (500, 700, 300)
    assert parts(job(trained=100, rank=2, cards=2, shard="zero3"))["gathered"] == 2 * 1 * 1000 + 4 * 3000


def test_what_is_offloaded_is_on_the_host() -> None:
    away = job(offload=frozenset({"weights", "gradients", "master", "moments", "activations"}), policy="recompute")
    on_card, host = parts(away), parts(away, "host")
    assert not {"parameters", "master", "moments"} & set(on_card)
    assert on_card["gathered"] == 2 * (2 * 1000 + 3000)
    assert on_card["gradients"] == 2 * 3 * 3000
    assert (host["parameters"], host["gradients"], host["master"], host["moments"]) == (14_000, 21_000, 35_000, 49_000)
    assert host["inputs"] == 2 * 20 * 8 * 4
    assert host["context"] == 2 * 2**30


def test_M07_an_optimizer_on_the_host_counts_for_the_box_not_for_each_card() -> None:
    away = job(cards=4, shard="zero2", offload=frozenset({"moments", "master", "update", "gradients"}), formats=MIXED)
    found = {part: size for part, (size, _) in host_parts(away).items()}
    assert (found["master"], found["moments"], found["gradients"]) == (4 * 7000, 8 * 7000, 4 * 7000)
    assert found["context"] == 4 * 2 * 2**30
    two_boxes = {part: size for part, (size, _) in host_parts(replace(away, cards_a_box=2)).items()}
    assert two_boxes["moments"] == 8 * 7000 / 2


def test_paged_moments_fill_what_is_left_of_the_card() -> None:
    wide = job(offload=frozenset({"paged"}), card=replace(job().card, memory_bytes=10**7))
    assert parts(wide)["paged"] == 7 * 7000
    assert allocated_bytes(job_ledger(wide, A)) == (2 + 3 + 5) * 7000 + 290 * 2 * 8 * 4 + 8800
    assert reserved_bytes(job_ledger(wide, A)) == device_bytes(job_ledger(wide, A)) - 7 * 7000 - 1000
    taken = device_bytes(job_ledger(wide, A)) - 7 * 7000
    narrow = replace(wide, card=replace(job().card, memory_bytes=taken + 5000))
    assert parts(narrow)["paged"] == 5000


def test_what_the_allocator_holds() -> None:
    plenty = job(card=replace(job().card, memory_bytes=10**7))
    ledger = job_ledger(plenty, A)
    passing = 290 * 2 * 8 * 4 + 11 * 8 * 100
    static = (2 + 3 + 5 + 7) * 7000
    assert allocated_bytes(ledger) == static + passing
    assert reserved_bytes(ledger) == static + 1.5 * passing
    assert device_bytes(ledger) == static + 1.5 * passing + 1000
    assert needed_bytes(plenty, A) == static + passing + 1000


def test_M11_many_lengths_waste_logits_of_the_shorter_ones() -> None:
    plenty = job(card=replace(job().card, memory_bytes=10**7), varied_lengths=True)
    assert parts(plenty)["fragmentation"] == 2 * 11 * 8 * 100


def test_under_pressure_the_allocator_gives_back() -> None:
    used = allocated_bytes(job_ledger(job(), A))
    assert parts(job(card=replace(job().card, memory_bytes=used + 1000 + 77)))["fragmentation"] == 77
    assert "fragmentation" not in parts(job(card=replace(job().card, memory_bytes=used)))
