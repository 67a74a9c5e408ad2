"""Machines and requests for planner tests."""

from __future__ import annotations

from typing import Any

from muletrain.spec.machine import (
    AttentionRate,
    ComputeRates,
    Gpu,
    LinkRates,
    Machine,
    MatmulRate,
    Measured,
    Sample,
    SustainedRate,
)
from muletrain.spec.recipe import RunConfig

GIB = 2**30
RTX_4090 = Gpu(name="NVIDIA GeForce RTX 4090", memory_bytes=24564 * 2**20, capability=(8, 9), driver="560.35")
H200 = Gpu(name="NVIDIA H200", memory_bytes=143771 * 2**20, capability=(9, 0), driver="560.35")
T4 = Gpu(name="Tesla T4", memory_bytes=15360 * 2**20, capability=(7, 5), driver="560.35")


def box(*gpus: Gpu, host_gib: int = 64, cores: int = 8) -> Machine:
    return Machine(hostname="box", cpu="x", cores=cores, host_memory_bytes=host_gib * GIB, gpus=gpus)


def request(changes: dict[str, Any] | None = None) -> RunConfig:
    """A small sound request; `changes` are {dotted key: value}."""
    tree: dict[str, Any] = {
        "run_dir": "r",
        "model": {"source": "smollm2-135m"},
        "data": {"source": ["d"], "sequence_length": 512},
        "train": {"steps": 100, "tokens_per_step": 4096},
        "precision": {"compute": "fp32"},
    }
    for key, value in (changes or {}).items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return RunConfig.model_validate(tree)


def one(value: float) -> Sample:
    return Sample(median=value, low=value, high=value, n=1)


def measured(device: str) -> Measured:
    """Two products, a thin one at half the rate."""
    rates = ComputeRates(
        device=device,
        matmuls=(
            MatmulRate(dtype="bf16", m=1024, k=1024, n=1024, flops_s=one(8.0)),
            MatmulRate(dtype="bf16", m=16, k=1024, n=1024, flops_s=one(4.0)),
            MatmulRate(dtype="fp32", m=64, k=64, n=64, flops_s=one(1.0)),
        ),
        attention=(
            AttentionRate(
                dtype="bf16", rows=1, sequence=512, heads=2, kv_heads=2, head_dim=64, forward_flops_s=one(3.0),
                backward_flops_s=one(2.0),
            ),
        ),
        sustained=(
            SustainedRate(busy=0.5, flops_s=one(8.8)),
            SustainedRate(busy=0.75, flops_s=one(7.2)),
            SustainedRate(busy=1.0, flops_s=one(6.4)),
        ),
        memory_bytes_s=one(100.0),
        kernel_s=one(0.5),
    )  # fmt: skip
    link = LinkRates(gpu=1, up=one(5), down=one(6), both=one(10), copy_s=one(0.1))
    return Measured(
        taken="2026-11-30T00:00:00Z", torch="2.13", seconds=1.0, compute=(rates,), links=(link,), together=None, peers=(),
        host_copy=(),
        disks=(), missing=(),
    )  # fmt: skip


def measured_box(*gpus: Gpu, device: str) -> Machine:
    """Of made-up rates; only the second card's link is measured."""
    return box(*gpus).model_copy(update={"measured": measured(device)})
