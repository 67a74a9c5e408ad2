"""Peaks are matched by the exact driver name, dense, with fp32 accumulation."""

from __future__ import annotations

import pytest

from muletrain.catalog.gpus import gpu_peak, gpu_rows


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 4090", "fp16", 165.2),
        ("NVIDIA GeForce RTX 4090", "fp32", 82.6),
        ("NVIDIA GeForce RTX 4090", "fp8", 330.3),
        ("NVIDIA GeForce RTX 4090 D", "bf16", 147.1),
        ("NVIDIA GeForce RTX 3090", "bf16", 71.0),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("Tesla T4", "fp16", 65.0),
    ],
)
def test_S05_known_gpu_has_its_own_dense_peak(name: str, dtype: str, tflops: float) -> None:
    assert gpu_peak(name, dtype) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4080 SUPER",
        "RTX 4090",
        "nvidia geforce rtx 4090",
        "NVIDIA GeForce RTX 4090 ",
        "NVIDIA A100",
        "NVIDIA H100",
        "AMD Instinct MI300X",
        "",
    ],
)
def test_S05_unknown_gpu_gets_no_other_cards_peak(name: str) -> None:
    assert gpu_peak(name, "bf16") is None


def test_S05_rate_a_card_does_not_have_is_absent() -> None:
    assert gpu_peak("Tesla T4", "bf16") is None
    assert gpu_peak("NVIDIA GeForce RTX 3090", "fp8") is None
    assert gpu_peak("NVIDIA GeForce RTX 4090", "fp64") is None


def test_every_row_has_a_source_and_its_own_names() -> None:
    rows = gpu_rows()
    assert len({row["gpu"] for row in rows.values()}) >= 30
    assert all(row["source"] for row in rows.values())
    assert sum(len(row["driver_names"].split(";")) for row in {row["gpu"]: row for row in rows.values()}.values()) == len(rows)
    assert all(float(row["fp16_tensor_fp32acc_tflops"]) >= float(row["fp32_tflops"]) for row in rows.values())
