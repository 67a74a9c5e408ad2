"""Memory, computed again by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from muletrain.catalog.families import model_shape
from muletrain.catalog.models import model_config
from muletrain.planner.footprint import Footprint, block_activations
from muletrain.planner.memory import ledger
from muletrain.spec.ledger import Ledger
from muletrain.spec.model_shape import ModelShape

GIB = 2**30
# 1,000 parameters in each of 4 blocks, 3,000 outside (embedding 1,490, head 1,490, last norm 20).
SHAPE = ModelShape(
    name="x", family="llama", hidden=20, layers=4, heads=2, kv_heads=1, head_dim=10, ffn=50, vocab=100, tied=False,
    max_positions=64, parameters=7000, block_parameters=1000, matmul_parameters=5000,
)  # fmt: skip
RUN = Footprint(
    strategy="resident", activations="keep", compute="fp32", compiled=True, device="cuda", workers=1, micro_batch=2,
    micro_batches=6, sequence_length=8, loss_chunk=5,
)  # fmt: skip


def parts(found: Ledger, place: str = "card") -> dict[str, int]:
    return {item.part: item.size_bytes for item in found.items if item.place == place}


def states(run: Footprint) -> dict[str, int]:
    return {part: size for part, size in parts(ledger(SHAPE, run)).items() if part not in ("activations", "logits", "context")}


def test_resident_fp32_is_16_bytes_a_parameter() -> None:
    assert states(RUN) == {"parameters": 28_000, "gradients": 28_000, "moments": 56_000}
    assert sum(states(RUN).values()) == 16 * 7000


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_resident_16_bit_is_18_bytes_and_a_blocks_gradient(compute: str) -> None:
    found = states(replace(RUN, compute=compute))  # type: ignore[arg-type]
    assert found == {"parameters": 14_000, "master": 28_000, "gradients": 28_000, "moments": 56_000, "workspace": 2 * 3000}
    assert sum(found.values()) - found["workspace"] == 18 * 7000


def test_resident_fp64_is_32_bytes() -> None:
    assert sum(states(replace(RUN, compute="fp64")).values()) == 32 * 7000


def test_resident_is_the_same_on_each_of_several_workers() -> None:
    assert states(replace(RUN, workers=3)) == states(RUN)


def test_zero1_holds_whole_parameters_and_gradients_until_the_last_micro_batch() -> None:
    assert states(replace(RUN, strategy="zero1", compute="bf16", workers=2)) == {
        "parameters": 2 * 7000,
        "master": 4 * 3500,
        "gradients": 4 * 3500 + 4 * 7000,
        "moments": 8 * 3500,
        "workspace": 6 * 3000,
    }


def test_zero1_with_one_micro_batch_a_worker_holds_no_whole_gradient() -> None:
    assert states(replace(RUN, strategy="zero1", workers=6))["gradients"] == round(4 * 7000 / 6)
    assert states(replace(RUN, strategy="zero1", workers=5))["gradients"] == round(4 * 7000 / 5) + 4 * 7000


def test_zero2_shards_gradients_too() -> None:
    assert states(replace(RUN, strategy="zero2", compute="bf16", workers=2)) == {
        "parameters": 2 * 7000,
        "master": 4 * 3500,
        "gradients": 4 * 3500,
        "moments": 8 * 3500,
        "workspace": 6 * 3000,
    }


def test_zero3_gathers_two_blocks_and_what_is_outside() -> None:
    found = states(replace(RUN, strategy="zero3", compute="bf16", workers=4))
    assert found["parameters"] == 2 * (2 * 1000 + 3000)
    assert found["master"] + found["gradients"] + found["moments"] == 16 * 7000 / 4


def test_streamed_state_is_on_the_host_and_slots_are_two() -> None:
    found = parts(
        ledger(SHAPE, replace(RUN, strategy="streamed", activations="recompute", compute="bf16", device="cpu")), "host"
    )
    assert (found["parameters"], found["master"], found["gradients"], found["moments"]) == (14_000, 28_000, 28_000, 56_000)
    assert found["slots"] == 2 * 2 * 1000
    # layer-major: the inputs of all six micro-batches, and one whole block of one micro-batch
    assert found["activations"] == 2 * 20 * 16 * 4 * 6 + block_activations(SHAPE, replace(RUN, compute="bf16"))


def test_a_blocks_activations() -> None:
    # 4 x 20 + 2 x 20 + 2 x 10 + 3 x 50 = 290 numbers a token, 16 tokens, 4 bytes
    assert block_activations(SHAPE, RUN) == 290 * 16 * 4
    # eager: 6 x 20 + 2 x 20 + 2 x 10 + 4 x 50 = 380; norms in fp32 beside 16-bit numbers: 2 x 20 more
    assert block_activations(SHAPE, replace(RUN, compiled=False)) == 380 * 16 * 4
    assert block_activations(SHAPE, replace(RUN, compiled=False, compute="bf16")) == 420 * 16 * 2
    qwen = SHAPE.model_copy(update={"family": "qwen3"})
    assert block_activations(qwen, replace(RUN, compiled=False)) == (380 + 2 * 30) * 16 * 4
    plain = SHAPE.model_copy(update={"family": "gpt2", "gated": False})
    assert block_activations(plain, RUN) == 240 * 16 * 4
    assert block_activations(plain, replace(RUN, compiled=False)) == (80 + 40 + 20 + 250) * 16 * 4
    assert block_activations(SHAPE, replace(RUN, compute="bf16")) == 290 * 16 * 2


def test_a_7b_block_keeps_132_kb_a_token() -> None:
    shape = model_shape(model_config("deepseek-llm-7b"), "x")
    assert block_activations(shape, replace(RUN, compute="bf16", micro_batch=1, sequence_length=1)) == pytest.approx(
        132e3, rel=0.01
    )


def test_keeping_and_recomputing() -> None:
    block = 290 * 16 * 4
    assert parts(ledger(SHAPE, RUN))["activations"] == 4 * block
    assert parts(ledger(SHAPE, replace(RUN, activations="recompute")))["activations"] == 4 * 20 * 16 * 4 + block


@pytest.mark.parametrize(("chunk", "tokens"), [(5, 5), (16, 16), (1024, 16)])
def test_logits_of_one_chunk_at_most_a_micro_batch(chunk: int, tokens: int) -> None:
    assert parts(ledger(SHAPE, replace(RUN, loss_chunk=chunk)))["logits"] == 12 * tokens * 100
    assert parts(ledger(SHAPE, replace(RUN, loss_chunk=chunk, compute="fp64")))["logits"] == 24 * tokens * 100


def test_context_on_cards_and_host() -> None:
    one, three = ledger(SHAPE, RUN), ledger(SHAPE, replace(RUN, workers=3))
    assert (parts(one)["context"], parts(one, "host")) == (GIB // 2, {"context": 2 * GIB})
    assert (parts(three)["context"], parts(three, "host")) == (GIB, {"context": 6 * GIB})


def test_on_a_cpu_all_workers_share_the_host() -> None:
    cpu = ledger(SHAPE, replace(RUN, device="cpu", workers=3))
    assert cpu.total("card") == 0
    assert parts(cpu, "host") == {part: 3 * size for part, size in parts(ledger(SHAPE, RUN)).items()}
