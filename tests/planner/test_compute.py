"""Time by part, by hand: a made-up device of one rate for everything, and a block small enough to count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from muletrain.planner.compute import (
    Parts,
    block_products,
    block_time,
    compute_time,
    embedding_time,
    head_time,
    optimizer_s,
    stream_rates,
    unit_times,
)
from muletrain.planner.footprint import Footprint
from muletrain.planner.speed import Link, Speed
from muletrain.planner.streamed import stream_plan, unit_parameters
from muletrain.schedule.ops import StepShape
from muletrain.schedule.simulate import simulate_steady
from muletrain.spec.errors import InputError
from muletrain.spec.model_shape import Linear, ModelShape
from muletrain.spec.plan import AdapterPlan, StreamingPlan

H, F, V, S = 8, 16, 100, 32
LLAMA = ModelShape(
    name="x", family="llama", hidden=H, layers=3, heads=4, kv_heads=2, head_dim=2, ffn=F, vocab=V, tied=False, max_positions=64,
    parameters=2 * V * H + 3 * (3 * H * F + 2 * H * H + 2 * H * 4 + 2 * H) + H, block_parameters=3 * H * F + 3 * H * H + 2 * H,
    matmul_parameters=3 * (3 * H * F + 3 * H * H) + V * H,
)  # fmt: skip
RUN = Footprint(
    strategy="streamed", activations="recompute", compute="bf16", compiled=True, device="cuda", workers=1, micro_batch=2,
    micro_batches=4, sequence_length=S, loss_chunk=16, streaming=StreamingPlan(inputs="card"),
)  # fmt: skip
TOKENS = 2 * S
PLAIN = Speed(
    source="made up", products=(((1, 1, 1), 1.0),), attention_forward=(((1, 1), 1.0),), attention_backward=(((1, 1), 0.5),),
    memory_bytes_s=1.0, kernel_s=0.0, link=Link(1.0, 1.0, 2.0, 0.0),
)  # fmt: skip
"""A FLOP a second, half of one in attention backward, a byte a second."""
MATRICES = 3 * H * F + 2 * H * 8 + 2 * H * 4
"""q and o are 8 x 8, k and v 8 x 4."""


def test_a_block_by_hand() -> None:
    found = block_time(LLAMA, RUN, PLAIN)
    products, attention = 2 * MATRICES * TOKENS, 2 * 2 * S * S * 8
    turned = 2 * (8 + 4)
    assert found.forward == Parts(products, attention, 2 * TOKENS * (9 * H + turned + 3 * F))
    assert found.recompute == Parts(products - 2 * F * H * TOKENS, attention, 2 * TOKENS * (6 * H + turned + 3 * F))
    assert found.input_gradient == Parts(products, 2.5 * attention / 0.5, 2 * TOKENS * (11 * H + turned + 5 * F))
    assert found.weight_gradient == Parts(products)
    assert found.sums.elementwise_s == LLAMA.block_parameters * (2 + 4 * (1 + 2 * 3) / 4)
    whole = found.step(recompute=True).total_s
    assert whole == pytest.approx(found.step(recompute=False).total_s + found.recompute.total_s)


def test_eager_blocks_make_more_passes_and_inputs_on_the_host_two() -> None:
    compiled = block_time(LLAMA, RUN, PLAIN).forward
    eager = block_time(LLAMA, replace(RUN, compiled=False), PLAIN).forward
    assert eager.elementwise_s == 3.5 * compiled.elementwise_s and eager.matmul_s == compiled.matmul_s
    host = block_time(LLAMA, replace(RUN, streaming=StreamingPlan(inputs="host")), PLAIN).forward
    assert host.elementwise_s - compiled.elementwise_s == 2 * TOKENS * 2 * H


def test_gpt2_has_four_matrices_and_no_rotary() -> None:
    matrices = 4 * H * H + 2 * H * F
    changes = {"family": "gpt2", "kv_heads": 4, "gated": False, "matmul_parameters": 3 * matrices + V * H}
    shape = LLAMA.model_copy(update=changes)
    assert block_products(shape) == [(H, 3 * 8), (8, H), (H, F), (F, H)]
    assert block_time(shape, RUN, PLAIN).forward.matmul_s == 2 * matrices * TOKENS
    found = block_time(shape, RUN, PLAIN)
    assert found.forward.elementwise_s == 2 * TOKENS * (9 * H + 2 * F)
    assert found.input_gradient.elementwise_s == 2 * TOKENS * (11 * H + 3 * F)


def test_a_slow_host_shows_as_far_as_it_is_slower() -> None:
    found = block_time(LLAMA, RUN, replace(PLAIN, kernel_s=1e4)).forward
    assert found.total_s == 14 * 1e4
    assert found.launch_s == 14 * 1e4 - block_time(LLAMA, RUN, PLAIN).forward.total_s
    assert block_time(LLAMA, RUN, replace(PLAIN, kernel_s=1e-9)).forward.launch_s == 0


def test_the_head_by_hand() -> None:
    """Four chunks of 16 tokens."""
    found = head_time(LLAMA, RUN, PLAIN)
    assert found.forward == Parts(2 * V * H * TOKENS, 0, 2 * TOKENS * (4 * V + 4 * H))
    assert found.input_gradient == Parts(2 * V * H * TOKENS, 0, 2 * TOKENS * 5 * H)
    assert found.weight_gradient == Parts(2 * V * H * TOKENS, 0, 4 * (4 + 4) * V * H)
    joins = (V * H + H) * (2 + 4 * 7 / 4)
    assert found.sums.elementwise_s == V * H * (4 + 6 + 4) + joins


def test_the_embedding_by_hand() -> None:
    found = embedding_time(LLAMA, RUN, PLAIN)
    assert found.forward == Parts(elementwise_s=2 * 2 * H * TOKENS)
    assert found.sums.elementwise_s == V * H * (2 + 2 + 7)


def test_a_step_is_its_units_times_its_micro_batches() -> None:
    block, head, first = block_time(LLAMA, RUN, PLAIN), head_time(LLAMA, RUN, PLAIN), embedding_time(LLAMA, RUN, PLAIN)
    outer = head.step(recompute=False).total_s + first.step(recompute=False).total_s
    expected = 4 * (3 * block.step(recompute=True).total_s + outer)
    assert compute_time(LLAMA, RUN, PLAIN).total_s == pytest.approx(expected)
    kept = compute_time(LLAMA, replace(RUN, activations="keep"), PLAIN).total_s
    assert kept == pytest.approx(expected - 12 * block.recompute.total_s)


def test_the_optimizer_moves_every_state_twice() -> None:
    assert optimizer_s(10, RUN, PLAIN) == 10 * (8 + 16 + 8 + 2)
    assert optimizer_s(10, replace(RUN, compute="fp32"), PLAIN) == 10 * (8 + 16 + 8)


def test_the_simulator_takes_the_same_seconds() -> None:
    """With a link of no time, a streamed step's compute is the model's own, the norm beside it."""
    fast = replace(PLAIN, link=Link(1e30, 1e30, 1e30, 0.0))
    plan, rates = stream_plan(LLAMA, RUN), stream_rates(LLAMA, RUN, fast)
    step = StepShape(micro_batches=(TOKENS,) * 4, sequence_length=S, pending=True, mode="train")
    line = simulate_steady(plan, step, rates)
    norm = 4.0 * sum(unit_parameters(LLAMA))
    assert line.busy_s["compute"] == pytest.approx(compute_time(LLAMA, RUN, fast).total_s + norm)
    assert [len(unit_times(LLAMA, RUN, fast)), len(plan.units)] == [5, 5]


def test_without_a_link_nothing_streams() -> None:
    with pytest.raises(InputError, match=r"the link of this card is not known \(made up\): measure it with `mule probe"):
        stream_rates(LLAMA, RUN, replace(PLAIN, link=None))


def test_beside_an_adapter_the_model_has_no_gradients_of_its_own() -> None:
    """Rank 4 on two layers of 8 x 16 and 16 x 8."""
    linears = (Linear(name="mlp.up_proj", inputs=H, outputs=F), Linear(name="mlp.down_proj", inputs=F, outputs=H))
    shape = LLAMA.model_copy(update={"linears": linears})
    run = replace(
        RUN, adapter=AdapterPlan(kind="lora", rank=4, targets=("up_proj", "down_proj"), parameters=3 * 2 * 4 * (H + F))
    )
    found, plain = block_time(shape, run, PLAIN), block_time(shape, RUN, PLAIN)
    assert found.weight_gradient == found.sums == Parts()
    passes = {"forward": (H + 4 * F) + (F + 4 * H), "input_gradient": (5 * H + 2 * F) + (5 * F + 2 * H)}
    for part, numbers in passes.items():
        more = getattr(found, part).elementwise_s - getattr(plain, part).elementwise_s
        assert more == 2 * TOKENS * numbers
    assert head_time(shape, run, PLAIN).sums == embedding_time(shape, run, PLAIN).weight_gradient == Parts()
    assert compute_time(shape, run, PLAIN).total_s < compute_time(shape, RUN, PLAIN).total_s
