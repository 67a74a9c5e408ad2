"""Machines and requests for planner tests."""

from __future__ import annotations

from typing import Any

from muletrain.spec.machine import Gpu, Machine
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
