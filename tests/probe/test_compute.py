"""What is measured of a device is counted by its sizes; figures themselves are only held to be possible."""

from __future__ import annotations

import pytest
import torch

from muletrain.probe.compute import SQUARE, attention, card_rates, kernel, matmul, memory, processor_rates, shapes
from muletrain.probe.timing import Effort

QUICK = Effort(sample_s=0.002, samples=3, warm_s=0.002)
CPU = torch.device("cpu")
ON_A_CARD = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "fp64", "tf32"])
def test_a_product_is_counted_by_its_sizes(dtype: str, gradient: bool) -> None:
    found = matmul(CPU, dtype, 64, 32, 16, QUICK, gradient=gradient)  # type: ignore[arg-type]
    assert (found.dtype, found.m, found.k, found.n) == (dtype, 64, 32, 16)
    assert found.flops_s.low > 1e6
    assert not torch.backends.cuda.matmul.allow_tf32


def test_attention_counts_the_causal_half() -> None:
    found = attention(CPU, "fp32", 1, 64, 2, 16, QUICK)
    forward_s = 2 * 64**2 * 2 * 16 / found.forward_flops_s.median
    backward_s = 2.5 * 2 * 64**2 * 2 * 16 / found.backward_flops_s.median
    assert 1e-6 < forward_s < 1 and 1e-6 < backward_s < 1


def test_memory_and_starts_are_possible() -> None:
    assert 1e8 < memory(CPU, 2**22, QUICK).median < 1e13
    assert 1e-8 < kernel(CPU, QUICK).median < 1e-2


def test_quick_measures_a_part_of_what_is_measured_otherwise() -> None:
    few, many = shapes(quick=True), shapes(quick=False)
    assert set(few) < set(many) and len(set(many)) == len(many)
    assert few[0] == (SQUARE, SQUARE, SQUARE, False)


def test_the_processor_is_measured_in_the_format_it_trains_in() -> None:
    found = processor_rates(True, QUICK)
    assert found.device == "cpu" and {rate.dtype for rate in found.matmuls} == {"fp32"} and found.attention


@pytest.mark.gpu
@ON_A_CARD
def test_a_card_is_faster_at_halves() -> None:
    found = card_rates(torch.device("cuda", 0), "x", True, QUICK)
    best = {dtype: max(r.flops_s.median for r in found.matmuls if r.dtype == dtype) for dtype in ("bf16", "fp32")}
    assert best["bf16"] > 1.5 * best["fp32"] > 1e12
