"""Rows in the form of the published measurements."""

from __future__ import annotations

import csv
from pathlib import Path

LLAMA_7B = "L32 h4096 ffn11008 heads32 kv32 vocab32000 untied"
PLAIN = {
    "id": "r1", "source_key": "a", "gpu": "RTX 4090 24GB", "catalogue_gpu": "RTX 4090", "gpu_count": "1", "nodes": "1",
    "interconnect": "n/a", "framework": "LitGPT", "model": "Llama-2-7B", "architecture": LLAMA_7B, "params_b": "6.738",
    "method": "LoRA", "method_class": "lora", "lora_rank": "8", "seq_len": "1024", "micro_batch_per_gpu": "1",
    "grad_accum": "4", "global_batch_seqs": "", "precision": "bf16-true",
    "optimizer": "AdamW", "parallelism": "single GPU", "offload": "none",
    "activation_checkpointing": "full", "attention": "SDPA", "other_settings": "", "peak_mem_gib_per_gpu": "15.0",
    "peak_allocated_gib": "14.5", "mem_class": "allocated", "tokens_per_s_total": "3000", "outcome": "ran", "reliability": "A",
    "notes": "",
}  # fmt: skip


def row(**changes: str) -> dict[str, str]:
    return {**PLAIN, **changes}


def write(file: Path, *rows: dict[str, str]) -> Path:
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(PLAIN))
        writer.writeheader()
        writer.writerows(rows)
    return file
