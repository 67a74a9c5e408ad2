"""Time of any trainer's step, worked out by hand. The card does 1 TFLOP/s and moves 1 GB/s of its own memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from muletrain.catalog.gpus import find_gpu
from muletrain.planner.assumptions import Assumptions
from muletrain.planner.job import MIXED, PURE, Job, Network
from muletrain.planner.job_time import StepTime, filled, product_rate, step_time
from muletrain.spec.errors import InputError

from .jobs import CARD, SHAPE, job

A = Assumptions(
    product=1.0, product_geforce=1.0, fp8_over_16=2.0, memory_share=1.0, attention=1.0, attention_forward=0.5,
    attention_backward=0.25, eager_passes=3.0, kernel_s=1e-6, overlap=0.5, overlap_eager=0.0, other=1.0, logits_bytes=16.0,
    host_update_s=1e-9,
)  # fmt: skip
LINK = CARD.link_bytes_s
NET = Network(inside=1e6, outside=2e5, start_s=0.0, start_outside_s=0.0)


def time(**changes: Any) -> StepTime:
    return step_time(job(**changes), A)


def test_products_forward_and_twice_back() -> None:
    # 3,000 parameters of the blocks' matrices, 8 tokens, two micro-batches, 3 products of 2 FLOPs each
    assert time().matmul_s == pytest.approx(2 * 3 * 2 * 3000 * 8 / 1e12 / filled(job()))
    assert time(trained=50, rank=2).matmul_s == pytest.approx(2 * (2 * 2 * 3000 * 8 + 6 * 50 * 8) / 1e12 / filled(job()))


@pytest.mark.parametrize(
    ("changes", "products"),
    [
        ({"policy": "recompute"}, 3.85),
        ({"policy": "recompute", "kernels": "eager"}, 4.0),
        ({"policy": "selective"}, 3.35),
        ({"kept_share": 0.5}, 3.35),
    ],
)
def test_recomputing_repeats_forward(changes: dict[str, Any], products: float) -> None:
    assert time(**changes).matmul_s / time().matmul_s == pytest.approx(products / 3)


def test_small_products_leave_the_card_empty() -> None:
    # one tile of 128 tokens, one of 256 outputs, on 20 multiprocessors; sums of 20
    waves = 1 / 20
    assert filled(job()) == pytest.approx(waves / (waves + 0.35) * 20 / 180)
    large = job(shape=SHAPE.model_copy(update={"hidden": 8192}), micro_batch=4096)
    assert filled(large) == pytest.approx(1.0, abs=0.03)


def test_attention_is_done_at_its_own_rate() -> None:
    # 12 x 4 layers x 20 wide x 2 positions seen a token and step, a third of it forward; on compute capability 8.0
    forward = 12 * 4 * 20 * 2 / 3 * 8
    assert time().attention_s == pytest.approx(2 * (forward / 0.5 + 2.5 * forward / 0.25) / 1e12)
    hopper = time(card=replace(CARD, capability=(9, 0)))
    assert hopper.attention_s == pytest.approx(1.5 * time().attention_s)
    assert time(card=replace(CARD, capability=(9, 0)), kernels="written").attention_s == pytest.approx(time().attention_s)


def test_plain_attention_passes_scores_through_memory() -> None:
    added = time(flash=False).attention_s - time().attention_s
    assert added == pytest.approx(2 * 10 * 2 * 4 * 2 * 8 * 4 * 2 / 1e9)


def test_elementwise_kernels_pass_memory() -> None:
    # forward 9 x 20 + 2 (20 + 10) + 3 x 50 = 390 numbers, back 11 x 20 + 60 + 5 x 50 = 530
    assert time().elementwise_s == pytest.approx(2 * 2 * 8 * 4 * 920 / 1e9)
    assert time(kernels="eager").elementwise_s == pytest.approx(3 * time().elementwise_s)
    assert time(policy="recompute").elementwise_s == pytest.approx(2 * 2 * 8 * 4 * (390 * 1.85 + 530) / 1e9)
    assert time(matmul="fp8").elementwise_s == pytest.approx(2 * 2 * 8 * 4 * (920 + 5 * 110) / 1e9)


def test_adapters_pass_their_inputs_and_outputs() -> None:
    # inputs 60 + 20 + 40 + 50 = 170, outputs 20 + 20 + 20 + 100 + 20 = 180, added: 170 + 360 forward, 1.5 times that back
    added = time(trained=50, rank=2).elementwise_s - time().elementwise_s
    assert added == pytest.approx(2 * 2 * 8 * 4 * 2.5 * 530 / 1e9)
    half = time(trained=50, rank=2, adapter_fraction=0.5).elementwise_s - time().elementwise_s
    assert half == pytest.approx(added / 2)


def test_the_head_makes_and_passes_logits() -> None:
    # the card's products at 1 TFLOP/s: three of 100 x 20; 2.5 x 16 bytes a logit
    assert time().head_s == pytest.approx(2 * (6 * 2000 * 8 / 1e12 + 40 * 800 / 1e9))
    assert time(fused_loss=True).head_s == pytest.approx(2 * (6 * 2000 * 8 / 1e12 + 8 * 800 / 1e9))
    assert time(trained=50, rank=2).head_s == pytest.approx(2 * (4 * 2000 * 8 / 1e12 + 40 * 800 / 1e9))


def test_four_bit_weights_are_turned_into_16_for_each_use() -> None:
    assert time(dequantized=True).dequantize_s == pytest.approx(2 * 2 * 4.5 * 4000 / 1e9)
    assert time(dequantized=True, policy="recompute").dequantize_s == pytest.approx(2 * 2.85 * 4.5 * 4000 / 1e9)


def test_starting_kernels_takes_what_their_work_does_not_hide() -> None:
    fast = replace(CARD, bandwidth_bytes_s=1e15, flops={"bf16": 1e18})
    found = time(card=fast, kernels="eager")
    assert found.starts_s == pytest.approx(2 * 4 * 155e-6, rel=1e-3)
    assert time(card=fast).starts_s == pytest.approx(2 * 4 * 48e-6, rel=1e-3)
    assert time(card=fast, kernels="written").starts_s == 0
    assert time(card=fast, kernels="eager", trained=50, rank=2).starts_s == pytest.approx(2 * 4 * 155e-6 * 1.9, rel=1e-3)
    assert time(card=replace(CARD, bandwidth_bytes_s=1e6), kernels="eager").starts_s == 0


def test_an_update_reads_and_writes_the_state() -> None:
    # moments 2 x 7, masters 2 x 5, gradient twice 3, working copy 2
    assert time().optimizer_s == pytest.approx(7000 * (14 + 10 + 6 + 2) / 1e9)
    assert time(cards=4, shard="zero1").optimizer_s == pytest.approx(7000 * 32 / 4 / 1e9)
    assert time(formats=PURE).optimizer_s == pytest.approx(7000 * (8 + 4 + 4 + 2) / 1e9)
    assert time(offload=frozenset({"update"})).optimizer_s == pytest.approx(7000 * 1e-9)


def test_state_that_waits_on_the_host_crosses_the_link_twice() -> None:
    assert time(offload=frozenset({"moments", "master"})).transfer_s == pytest.approx(7000 * 2 * (7 + 5) / LINK)
    assert time(offload=frozenset({"update"})).transfer_s == pytest.approx(7000 * (3 + 2) / LINK)


def test_weights_and_inputs_cross_beside_compute() -> None:
    slow = replace(CARD, pcie_lanes=1, bandwidth_bytes_s=1e15, flops={"bf16": 1e18})
    quick = replace(A, kernel_s=0.0)
    found = step_time(job(card=slow, offload=frozenset({"weights", "activations"})), quick)
    weights, inputs = 2 * 2 * 7000 * 2, 2 * 20 * 8 * 4 * 2
    assert found.transfer_s == pytest.approx((weights + inputs) / slow.link_bytes_s, rel=1e-3)
    assert time(offload=frozenset({"weights"}), card=replace(CARD, bandwidth_bytes_s=1e5)).transfer_s == 0


def test_data_parallel_sums_gradients_once_a_step() -> None:
    quick = replace(A, overlap=0.0)
    found = step_time(job(cards=4, network=NET), quick)
    assert found.communication_s == pytest.approx(2 * 3 / 4 * 3 * 7000 / 1e6)
    more = step_time(job(cards=4, network=NET, micro_batches=9), quick)
    assert more.communication_s == pytest.approx(found.communication_s)


def test_zero2_and_zero3_talk_every_micro_batch() -> None:
    quick = replace(A, overlap=0.0)
    zero2 = step_time(job(cards=4, network=NET, shard="zero2"), quick)
    assert zero2.communication_s == pytest.approx(3 / 4 * (2 * 3 + 2) * 7000 / 1e6)
    zero3 = step_time(job(cards=4, network=NET, shard="zero3"), quick)
    assert zero3.communication_s == pytest.approx(2 * 3 / 4 * (2 * 2 + 3) * 7000 / 1e6)


def test_a_ring_between_boxes_goes_at_their_networks_rate() -> None:
    quick = replace(A, overlap=0.0)
    found = step_time(job(cards=16, cards_a_box=8, network=NET), quick)
    assert found.communication_s == pytest.approx(2 * 15 / 16 * 3 * 7000 / 2e5)
    hybrid = step_time(job(cards=16, cards_a_box=8, network=NET, shard="zero1", shard_over=8), quick)
    inside, between = 2 * 7 / 8 * 3 * 7000 / 1e6, 2 * 1 / 2 * 3 * 7000 / 8 / 2e5
    assert hybrid.communication_s == pytest.approx(inside + between)


def test_starting_collectives_takes_longer_the_more_boxes_there_are() -> None:
    quick, late = replace(A, overlap=0.0), replace(NET, start_outside_s=1e-3)
    found = step_time(job(cards=32, cards_a_box=8, network=late), quick)
    plain = step_time(job(cards=32, cards_a_box=8, network=NET), quick)
    assert found.communication_s - plain.communication_s == pytest.approx(4 / 4 * 1e-3 * 2)  # a bucket of 4 blocks, log2 of 4


def test_communication_hides_behind_compute_but_not_in_eager_code() -> None:
    busy = {"cards": 4, "network": NET, "shard": "zero3", "card": replace(CARD, bandwidth_bytes_s=1e6)}
    assert time(**busy).communication_s == 0
    assert time(**busy, kernels="eager").communication_s == pytest.approx(2 * 3 / 4 * 7 * 7000 / 1e6)


def test_tensor_parallel_sums_hidden_states() -> None:
    found = time(cards=2, tensor=2, network=NET)
    assert found.communication_s == pytest.approx(2 * 4 * 4 * 2 * 1 / 2 * 2 * 20 * 8 / 1e6)
    again = time(cards=2, tensor=2, network=NET, policy="recompute")
    assert again.communication_s == pytest.approx(1.5 * found.communication_s)


def test_a_pipeline_has_a_bubble_and_sends() -> None:
    found = time(cards=2, pipeline=2, network=NET)
    compute = found.matmul_s + found.attention_s + found.elementwise_s + found.head_s + found.starts_s
    assert found.bubble_s == pytest.approx(compute / 2)
    assert found.communication_s == pytest.approx(2 * 2 * 2 * 20 * 8 / 2e5)


def test_rows_cut_over_cards_send_keys_and_values_on() -> None:
    quick = replace(A, overlap=0.0)
    found = step_time(job(cards=2, context=2, network=NET, shard="zero3"), quick)
    plain = step_time(job(cards=2, network=NET, shard="zero3", micro_batch=1), quick)
    assert found.communication_s - plain.communication_s == pytest.approx(2 * 4 * 2 * 2 * 10 * 4 * 3 / 1e6)


def test_everything_else_is_a_share() -> None:
    known = step_time(job(), A).step_s
    assert step_time(job(), replace(A, other=1.1)).step_s == pytest.approx(1.1 * known)


@pytest.mark.parametrize(
    ("name", "matmul", "tflops"),
    [
        ("RTX 4090", "bf16", 165.2),
        ("RTX 4090", "fp16_fp16", 330.3),
        ("RTX 4090", "fp8", 330.4),
        ("H100 SXM5 80GB", "bf16", 770),  # power: 700 W at 1.1 TFLOP/s a watt
        ("L40S", "bf16", 231),  # power: 350 W at 0.66
        ("A100 SXM4 80GB", "bf16", 272),  # power: 400 W at 0.68
    ],
)
def test_product_rates_of_real_cards(name: str, matmul: Any, tflops: float) -> None:
    assert product_rate(find_gpu(name), matmul, A) == pytest.approx(tflops * 1e12, rel=0.01)


def test_a_lower_power_limit_slows_products() -> None:
    card = find_gpu("RTX 3090")
    assert product_rate(card, "bf16", A, power_w=350 / 4) == pytest.approx(71e12 / 2)
    assert product_rate(find_gpu("L40S"), "bf16", A, power_w=175) == pytest.approx(115.5e12)


def test_H13_a_card_without_the_format_is_an_error() -> None:
    with pytest.raises(InputError, match="RTX 3090 has no fp8 tensor units; use another precision or card"):
        product_rate(find_gpu("RTX 3090"), "fp8", A)
    with pytest.raises(InputError, match="T4 has no bf16 tensor units"):
        product_rate(find_gpu("T4"), "bf16", A)


def test_H07_two_cards_without_nvlink_are_slower_than_one_at_the_same_global_batch() -> None:
    one_card = Job(shape=SHAPE, card=CARD, sequence=4, micro_batch=1, micro_batches=2, formats=MIXED)
    slow = Network(inside=1e5)
    one = step_time(one_card, A)
    two = step_time(replace(one_card, cards=2, micro_batches=1, network=slow), A)
    assert two.step_s > one.step_s
    assert two.communication_s / two.step_s > 0.5
    # with more accumulation the same sums are made once for more work
    more = step_time(replace(one_card, cards=2, micro_batches=64, network=slow), A)
    assert more.communication_s / more.step_s < two.communication_s / two.step_s
