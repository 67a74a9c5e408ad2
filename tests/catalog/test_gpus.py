"""Peaks are matched by the exact driver name, dense, with fp32 accumulation."""

from __future__ import annotations

import pytest

from muletrain.catalog.gpus import driver_spec, find_gpu, gpu_names, gpu_peak, gpu_rows
from muletrain.spec.errors import InputError


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


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 D", "RTX 4090 D"),
        ("h200", "H200 SXM 141GB"),
        ("RTX 5060 Ti", "RTX 5060 Ti 16GB"),
        ("Tesla V100-SXM2-32GB", "V100 SXM2 32GB"),
        ("V100 SXM2 16GB", "V100 SXM2 16GB"),
    ],
)
def test_a_card_is_found_by_what_people_call_it(text: str, name: str) -> None:
    assert find_gpu(text).name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("RTX 4090 Laptop GPU", "'RTX 4090 Laptop GPU' is not in the GPU catalogue; did you mean RTX 4090"),
        ("A100", "did you mean A100 PCIe 40GB or A100 SXM4 40GB or A100 PCIe 80GB or A100 SXM4 80GB"),
        ("RTX 4080 SUPER", "is not in the GPU catalogue; did you mean RTX 4080"),
        ("V100 SXM2", "may be Tesla V100-SXM2-16GB or Tesla V100-SXM2-32GB; write one of these"),
        ("Gaudi 3", "it has RTX 3090, RTX 3090 Ti, "),
        ("", "it has RTX 3090"),
    ],
)
def test_S05_a_name_that_is_no_card_is_an_error_with_the_nearest(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_gpu(text)


def test_every_catalogue_name_finds_its_row() -> None:
    for driver, row in gpu_rows().items():
        found = driver_spec(driver)
        assert found is not None and found.name == find_gpu(driver).name
        assert find_gpu(driver).source == row["source"]
    one_card = {name for name in gpu_names() if "/" not in name}
    assert {find_gpu(name).name for name in one_card} == one_card
    assert driver_spec("NVIDIA GeForce RTX 4090 Laptop GPU") is None


@pytest.mark.parametrize(
    ("name", "mebibytes"),
    [
        ("RTX 4090", 24564), ("H100 SXM5 80GB", 81559), ("H200", 143771), ("L40S", 46068), ("L4", 23034), ("T4", 15360),
        ("B200 SXM", 183359), ("RTX A6000", 49140), ("RTX 5090", 32607), ("Tesla V100-SXM2-16GB", 16384),
    ],
)  # fmt: skip
def test_memory_is_what_the_driver_shows(name: str, mebibytes: int) -> None:
    assert find_gpu(name).memory_bytes == pytest.approx(mebibytes * 2**20, rel=6e-3)


def test_figures_of_a_4090() -> None:
    card = find_gpu("RTX 4090")
    assert (card.capability, card.tdp_w, card.nvlink_bytes_s, card.peer_to_peer, card.geforce) == ((8, 9), 450, 0, False, True)
    assert card.link_bytes_s == pytest.approx(24.9e9, rel=0.01)
    assert (card.bandwidth_bytes_s, card.fp16_fp16_flops) == (1008e9, 330.3e12)
    assert card.flops == {"fp32": 82.6e12, "tf32": 82.6e12, "bf16": 165.2e12, "fp16": 165.2e12, "fp8": pytest.approx(330.3e12)}
    assert card.rent_usd_h == (0.22, 0.88)
    assert card.rent_source
    assert "bf16" not in find_gpu("T4").flops
    assert (find_gpu("RTX 3090").nvlink_pair, find_gpu("A100 SXM4 80GB").nvlink_pair) == (True, False)
