"""Published rows become jobs by what they say and by their trainer's defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from muletrain.bench.point_shape import read_shape
from muletrain.bench.point_trainer import UnmodelledError
from muletrain.bench.points import Point, read_points
from muletrain.planner.job import FP32_PARAMETERS, MEGATRON, MIXED, PURE, Job
from muletrain.spec.errors import InputError

from .points import LLAMA_7B, row, write


def point(tmp_path: Path, **changes: str) -> Point:
    (found,) = read_points(write(tmp_path / "points.csv", row(**changes)))
    return found


def job(tmp_path: Path, **changes: str) -> Job:
    found = point(tmp_path, **changes)
    assert found.job is not None, found.reason
    return found.job


FULL = {"method": "full", "method_class": "full", "lora_rank": ""}


def test_what_a_row_says(tmp_path: Path) -> None:
    found = job(tmp_path)
    assert (found.sequence, found.micro_batch, found.micro_batches, found.cards) == (1024, 1, 4, 1)
    assert found.shape.parameters == 6_738_415_616
    assert found.card.name == "RTX 4090"
    # queries and values of 32 blocks, rank 8
    assert (found.rank, found.trained) == (8, 32 * 2 * 8 * (4096 + 4096))


def test_measured_memory_is_of_the_kind_that_was_measured(tmp_path: Path) -> None:
    assert point(tmp_path).memory_bytes == 14.5 * 2**30
    assert point(tmp_path, mem_class="reserved").memory_bytes == 15 * 2**30
    assert point(tmp_path, mem_class="").memory_bytes == 0
    assert point(tmp_path, mem_class="active", peak_allocated_gib="").memory_kind == "allocated"
    assert point(tmp_path, other_settings="unpacked (short real lengths)").memory_bytes == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"other_settings": "unpacked (short real lengths)"}, "rows are shorter than stated"),
        ({"notes": "paged optimizer spills to host"}, "the optimizer's pages were swapped"),
        ({"method": "QLoRA (int4 GPTQ base)", "precision": "int4 base"}, "GPTQ kernels"),
    ],
)
def test_speed_that_is_not_of_the_stated_work_is_not_used(tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    found = point(tmp_path, **changes)
    assert (found.tokens_per_s, found.untimed) == (0, reason)
    assert point(tmp_path, **changes, tokens_per_s_total="").untimed == ""


def test_accumulation_comes_from_the_global_batch_where_it_is_not_stated(tmp_path: Path) -> None:
    found = job(tmp_path, grad_accum="", global_batch_seqs="512", micro_batch_per_gpu="4", gpu_count="4", parallelism="DP")
    assert found.micro_batches == 32


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seq_len": ""}, "sequence length not stated"),
        ({"micro_batch_per_gpu": ""}, "micro-batch not stated"),
        ({"architecture": "not stated", "model": "x"}, "architecture not stated"),
        ({"params_b": "20"}, "architecture and parameter count do not agree"),
        ({"parallelism": "ZeRO-3, DP2 x Ulysses SP4"}, "Ulysses sequence parallel"),
        ({"parallelism": "naive layer split"}, "layers on cards that take turns"),
        ({"method": "LLaMA-Adapter"}, "LLaMA-Adapter"),
        ({"precision": "nvfp4 matmuls"}, "fp4 products"),
        ({"precision": "int8 weights"}, "int8 training"),
        ({"precision": "not stated"}, "number format not stated"),
        ({"optimizer": "Muon"}, "Muon"),
        ({"optimizer": "AdamW ao 4-bit"}, "4-bit optimizer"),
        ({"outcome": "OOM_host"}, "ran out of host memory of a size that is not stated"),
        ({"catalogue_gpu": "RTX 9999"}, "'RTX 9999' is not in the GPU catalogue"),
    ],
)
def test_rows_that_cannot_be_planned_say_why(tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    found = point(tmp_path, **changes)
    assert found.job is None
    assert found.reason.startswith(reason)
    assert found.group == "not modelled"


@pytest.mark.parametrize(
    ("changes", "formats", "workspace"),
    [
        ({}, PURE, 0.0),
        ({"framework": "HF Trainer"}, PURE, 2.0),
        ({"framework": "MosaicML llm-foundry", "precision": "amp bf16 / FSDP DEFAULT"}, FP32_PARAMETERS, 4.0),
        ({"framework": "HF + DeepSpeed", "parallelism": "ZeRO-2"}, MIXED, 4.0),
        ({"framework": "HF + DeepSpeed"}, PURE, 2.0),
        ({"framework": "Megatron-DeepSpeed"}, MEGATRON, 0.0),
        ({"framework": "x", "precision": "bf16 compute, fp32 master and states"}, MIXED, 4.0),
        ({"framework": "x", "precision": "bf16 model, no mixed precision"}, PURE, 2.0),
    ],
)
def test_formats_of_trainers(tmp_path: Path, changes: dict[str, str], formats: Any, workspace: float) -> None:
    found = job(tmp_path, **FULL, **changes)
    assert (found.formats, found.update_workspace) == (formats, workspace)


def test_eight_bit_moments_and_paged_ones(tmp_path: Path) -> None:
    assert job(tmp_path, **FULL, optimizer="AdamW 8-bit").formats.moments == 2
    paged = job(tmp_path, **FULL, optimizer="paged_adamw_32bit", offload="none (paged optimizer)")
    assert paged.offload == {"paged"}
    assert paged.update_workspace == 0


@pytest.mark.parametrize(
    ("changes", "frozen", "outside"),
    [
        ({"precision": "nf4 base, bf16 compute"}, 0.5625, 2.0),
        ({"precision": "nf4-dq base, bf16 compute"}, 0.516, 2.0),
        ({"precision": "nf4 double-quant base, fp32 embeddings/head after k-bit prepare"}, 0.516, 4.0),
        ({"precision": "int4 GPTQ"}, 0.53, 2.0),
        ({"precision": "int8 GPTQ"}, 1.02, 2.0),
        ({}, 2.0, 2.0),
    ],
)
def test_frozen_bases(tmp_path: Path, changes: dict[str, str], frozen: float, outside: float) -> None:
    found = job(tmp_path, method="QLoRA" if changes else "LoRA", **changes)
    assert (found.formats.frozen, found.formats.outside, found.dequantized) == (frozen, outside, frozen < 1.5)


@pytest.mark.parametrize(
    ("parallelism", "expected"),
    [
        ("FSDP full shard", {"shard": "zero3"}),
        ("FSDP2 8 x CP 1", {"shard": "zero3", "shard_over": 8}),
        ("ZeRO-2", {"shard": "zero2"}),
        ("ZeRO-1 within 8 GPUs, DP", {"shard": "zero1", "shard_over": 8}),
        ("TP 2 x DP 2 x PP 2, 1F1B", {"tensor": 2, "pipeline": 2, "shard": "none"}),
        ("DDP (FSDP no-shard)", {"shard": "none"}),
    ],
)
def test_parallelism(tmp_path: Path, parallelism: str, expected: dict[str, Any]) -> None:
    found = job(tmp_path, **FULL, gpu_count="8", parallelism=parallelism)
    assert {name: getattr(found, name) for name in expected} == expected


def test_a_pipelines_batch_is_cut(tmp_path: Path) -> None:
    found = job(tmp_path, gpu_count="8", parallelism="PP 8", micro_batch_per_gpu="32", grad_accum="1")
    assert (found.micro_batch, found.micro_batches) == (1, 32)


@pytest.mark.parametrize(
    ("text", "policy", "share"),
    [
        ("full (re-entrant)", "recompute", 1.0),
        ("recompute-block", "recompute", 1.0),
        ("selective (per op)", "selective", 1.0),
        ("none", "keep", 1.0),
        ("recompute-norm", "keep", 1 - 2 * 4096 / (8 * 4096 + 3 * 11008)),
        ("recompute-ffn", "keep", 1 - 3 * 11008 / (8 * 4096 + 3 * 11008)),
    ],
)
def test_activations(tmp_path: Path, text: str, policy: str, share: float) -> None:
    found = job(tmp_path, activation_checkpointing=text)
    assert (found.policy, found.kept_share) == (policy, pytest.approx(share))


def test_offload(tmp_path: Path) -> None:
    assert job(tmp_path, offload="params+optimizer to CPU").offload == {"weights", "moments", "master", "update", "gradients"}
    written = {**FULL, "framework": "LLMQ (CUDA/C++)", "offload": "offload-opt-m offload-master offload-residual"}
    found = job(tmp_path, **written, parallelism="single GPU; shard-weights")
    assert found.offload == {"moments", "master", "activations", "weights"}
    assert found.formats.master == 2
    assert job(tmp_path, **{**written, "offload": "none"}).formats.master == 0


@pytest.mark.parametrize(
    ("changes", "inside", "outside"),
    [
        ({"interconnect": "NVLink", "catalogue_gpu": "A100 SXM4 80GB"}, 225e9, 0.0),
        ({"interconnect": "PCIe 4.0, no NVLink"}, 12.4e9, 0.0),
        ({"interconnect": "PCIe, no NVLink; copy-engine collectives"}, 21.2e9, 0.0),
        ({"interconnect": "PCIe, no NVLink, older motherboard with few lanes"}, 3.1e9, 0.0),
        ({"interconnect": "NVLink + 400 Gb/s RDMA per GPU", "nodes": "2", "catalogue_gpu": "A100 SXM4 80GB"}, 225e9, 160e9),
        ({"interconnect": "NVLink + TCP (no RoCE)", "nodes": "2", "catalogue_gpu": "A100 SXM4 80GB"}, 225e9, 6e9),
    ],
)
def test_networks(tmp_path: Path, changes: dict[str, str], inside: float, outside: float) -> None:
    network = job(tmp_path, gpu_count="8", parallelism="DP", **changes).network
    assert network is not None
    assert (network.inside, network.outside) == (pytest.approx(inside, rel=0.02), pytest.approx(outside))


def test_a_power_limit_and_a_variant_with_more_memory(tmp_path: Path) -> None:
    found = job(tmp_path, gpu="H100 96GB HBM2e (500 W Grand Teton)", catalogue_gpu="H100 SXM5 80GB")
    assert (found.power_w, found.card.memory_bytes) == (500, 96 * 2**30)


@pytest.mark.parametrize(
    ("changes", "group"),
    [
        ({}, "LoRA"),
        (FULL, "one card"),
        ({**FULL, "gpu_count": "2", "interconnect": "PCIe, no NVLink"}, "PCIe multi"),
        ({**FULL, "gpu_count": "2", "interconnect": "NVLink node"}, "NVLink"),
        ({"offload": "params to CPU"}, "offload"),
    ],
)
def test_classes(tmp_path: Path, changes: dict[str, str], group: str) -> None:
    assert point(tmp_path, **changes).group == group


@pytest.mark.parametrize(
    ("model", "architecture", "billions", "gated", "tied", "vocab"),
    [
        ("x", LLAMA_7B, 6.738, True, False, 32000),
        ("x", "L12 h768 ffn3072 heads12 kv12 vocab50368 tied (GELU)", 0.124, False, True, 50368),
        ("x", "L24 h1024 ffn4096 heads16 GPT-2 style; vocab not stated", 0.354, False, True, 51200),
        ("x", "L16 h4096 ffn16384 heads32 kv32 vocab50688 untied (GPT-NeoX)", 3.64, False, False, 50688),
        ("Qwen2.5-7B", "", 7.616, True, False, 152064),
    ],
)
def test_shapes(model: str, architecture: str, billions: float, gated: bool, tied: bool, vocab: int) -> None:
    shape = read_shape(model, architecture, billions * 1e9)
    assert (shape.gated, shape.tied, shape.vocab) == (gated, tied, vocab)
    assert shape.parameters == pytest.approx(billions * 1e9, rel=0.02)


def test_experts_are_counted_whole_and_used_in_part() -> None:
    text = "L32 h4096 ffn14336 heads32 kv8 experts8 top2 vocab32000 untied"
    shape = read_shape("x", text, 46.7e9)
    assert shape.parameters == pytest.approx(46.7e9, rel=0.01)
    assert shape.active_parameters == pytest.approx(12.9e9, rel=0.01)
    with pytest.raises(UnmodelledError, match="architecture not stated"):
        read_shape("x", "MoE: 235B total, 22B active", 235e9)


def test_files_of_another_form_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_points(tmp_path / "none.csv")
    (tmp_path / "a.csv").write_text("x,y\n1,2\n", encoding="utf-8")
    with pytest.raises(InputError, match="no column source_key, catalogue_gpu"):
        read_points(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="no rows"):
        read_points(tmp_path / "b.csv")
