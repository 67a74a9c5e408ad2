"""Published measurements, one row of a CSV each, as Jobs for the planner.

Columns are read by name; what a row does not say is taken from what its trainer does by default, which is public and written
down once (point_trainer.py), never from what the row measured. A row that says too little, or describes what the planner does
not model, keeps a reason instead of a job, so that it is counted and named.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from muletrain.bench.point_shape import read_shape
from muletrain.bench.point_trainer import UnmodelledError, read_trainer
from muletrain.catalog.gpus import find_gpu
from muletrain.planner.job import Job
from muletrain.spec.errors import InputError

REQUIRED = (
    "source_key", "catalogue_gpu", "gpu_count", "framework", "model", "architecture", "method", "seq_len",
    "micro_batch_per_gpu", "precision", "parallelism", "offload", "activation_checkpointing",
)  # fmt: skip
GIB = 2**30


@dataclass(frozen=True)
class Point:
    """One row."""

    name: str
    source: str
    row: Mapping[str, str]
    job: Job | None
    reason: str
    """Why there is no job; empty if there is one."""
    memory_bytes: float = 0.0
    """Measured on a card; 0: not published."""
    memory_kind: str = ""
    """allocated, reserved or device: what was measured."""
    tokens_per_s: float = 0.0
    """Measured, over all cards; 0: not published, or not of rows of the stated length."""
    untimed: str = ""
    """Why tokens_per_s is 0 although a speed is published; empty if that is not so."""
    ran: bool = True
    """False: out of memory on the card."""
    reliable: bool = True

    @property
    def group(self) -> str:
        """The class that errors are told by."""
        return group_of(self.job, self.row) if self.job else "not modelled"


def group_of(job: Job, row: Mapping[str, str]) -> str:
    """One card, PCIe or NVLink; with offload; with adapters."""
    if job.offload:
        return "offload"
    if job.rank:
        return "LoRA"
    if job.cards == 1:
        return "one card"
    return "NVLink" if "nvlink" in row.get("interconnect", "").lower().replace("no nvlink", "") else "PCIe multi"


def read_points(file: Path) -> list[Point]:
    """All rows. Raises InputError for a file that is not of this form."""
    try:
        rows = list(csv.DictReader(file.read_text(encoding="utf-8-sig").splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read: {error}") from None
    missing = [column for column in REQUIRED if rows and column not in rows[0]]
    if not rows or missing:
        raise InputError(f"{file}: " + (f"no column {', '.join(missing)}" if rows else "no rows"))
    return [_point(row, number) for number, row in enumerate(rows, start=2)]


def _point(row: Mapping[str, str], line: int) -> Point:
    name = row.get("id") or f"line {line}"
    kind = {"allocated": "allocated", "active": "allocated", "reserved": "reserved", "device": "device", "unknown": "reserved"}
    memory_kind = kind.get(row.get("mem_class", ""), "")
    allocated = _number(row.get("peak_allocated_gib"))
    measured = allocated if memory_kind == "allocated" and allocated else _number(row.get("peak_mem_gib_per_gpu"))
    speed, untimed = _number(row.get("tokens_per_s_total")), _untimed(row)
    base = Point(
        name,
        row["source_key"],
        row,
        None,
        "",
        memory_bytes=measured * GIB if memory_kind and "unpacked" not in row.get("other_settings", "") else 0.0,
        memory_kind=memory_kind,
        tokens_per_s=0.0 if untimed else speed,
        untimed=untimed if speed else "",
        ran=row.get("outcome", "ran") == "ran",
        reliable=row.get("reliability", "A") != "C",
    )
    try:
        job = _job(row)
    except (UnmodelledError, InputError) as error:
        return replace(base, reason=str(error))
    return replace(base, job=job)


def _job(row: Mapping[str, str]) -> Job:
    if row.get("outcome") == "OOM_host":
        raise UnmodelledError("ran out of host memory of a size that is not stated")
    if not row["seq_len"]:
        raise UnmodelledError("sequence length not stated")
    if not row["micro_batch_per_gpu"]:
        raise UnmodelledError("micro-batch not stated")
    shape = read_shape(row["model"], row["architecture"], _number(row.get("params_b")) * 1e9)
    card = find_gpu(row["catalogue_gpu"])
    size = re.search(r"(\d+)\s?GB", row.get("gpu", ""))
    if size and abs(float(size[1]) * GIB / card.memory_bytes - 1) > 0.1:  # a variant with more memory
        card = replace(card, memory_bytes=round(float(size[1]) * GIB))
    job = Job(
        shape=shape,
        card=card,
        sequence=round(_number(row["seq_len"])),
        micro_batch=max(1, round(_number(row["micro_batch_per_gpu"]))),
        micro_batches=max(1, round(_number(row.get("grad_accum")) or 1)),
        cards=max(1, round(_number(row["gpu_count"]))),
        cards_a_box=max(1, round(_number(row["gpu_count"])) // max(1, round(_number(row.get("nodes")) or 1))),
        power_w=_power(row),
    )
    job = read_trainer(job, row)
    whole = _number(row.get("global_batch_seqs"))
    if not row.get("grad_accum") and whole:
        job = replace(job, micro_batches=max(1, round(whole / job.micro_batch / job.data_parallel)))
    return job


def _untimed(row: Mapping[str, str]) -> str:
    """Why a row's speed is not that of the work it states; empty if it is."""
    if "unpacked" in row.get("other_settings", ""):
        return "rows are shorter than stated"
    if "spills to host" in row.get("notes", ""):
        return "the optimizer's pages were swapped"
    if "gptq" in row["method"].lower() or "gptq" in row["precision"].lower():
        return "GPTQ kernels"
    return ""


def _power(row: Mapping[str, str]) -> float:
    found = re.search(r"(\d+) W\b", row.get("gpu", "")) or re.search(r"power-limited to (\d+) W", row.get("notes", ""))
    return float(found[1]) if found else 0.0


def _number(text: str | None) -> float:
    try:
        return float(text) if text else 0.0
    except ValueError:
        return 0.0
