"""What a published row's trainer does: formats, kernels, sharding, offload, from its own columns and its public defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from muletrain.planner.job import (
    FP32_PARAMETERS,
    MEGATRON,
    MIXED,
    PURE,
    Formats,
    Job,
    Kernels,
    Matmul,
    Network,
    Offloaded,
    Shard,
)
from muletrain.planner.job_memory import block_numbers

Row = Mapping[str, str]
_NF4 = 0.5625
"""Bytes a parameter: 4 bits and an fp32 scale for 64 (Dettmers et al. 2023)."""
_NF4_DOUBLE = 0.516
"""With the scales quantized too."""
_GPTQ4, _INT8 = 0.53, 1.02
"""Groups of 128 with 16-bit scales and 4-bit zeros."""


class UnmodelledError(Exception):
    """A row that the planner has no formula for, and why."""


def read_trainer(job: Job, row: Row) -> Job:
    """`job` with all that depends on the trainer. Raises UnmodelledError."""
    _refuse(row)
    job = _parallel(job, row)
    job = _kernels(job, row)
    job = _method(job, row)
    job = _formats(job, row)
    job = _offload(job, row)
    job = replace(_policy(job, row), flash=row.get("attention") not in ("eager", "standard"))
    varied = "texts average" in row.get("notes", "")
    return replace(job, network=_network(job, row) if job.cards > 1 else None, varied_lengths=varied)


def _refuse(row: Row) -> None:
    if "ulysses" in row["parallelism"].lower():
        raise UnmodelledError("Ulysses sequence parallel")
    if "naive layer split" in row["parallelism"]:
        raise UnmodelledError("layers on cards that take turns")
    if "adapter" in row["method"].lower() and "lora" not in row["method"].lower():
        raise UnmodelledError("LLaMA-Adapter")
    if "nvfp4" in row["precision"]:
        raise UnmodelledError("fp4 products")
    if "int8" in row["precision"] and "gptq" not in row["precision"].lower():
        raise UnmodelledError("int8 training")
    if "muon" in row.get("optimizer", "").lower():
        raise UnmodelledError("Muon")
    if "4-bit" in row.get("optimizer", ""):
        raise UnmodelledError("4-bit optimizer")
    if "not stated" in row["precision"]:
        raise UnmodelledError("number format not stated")


def _parallel(job: Job, row: Row) -> Job:
    text = row["parallelism"]

    def ways(word: str) -> int:
        found = re.search(rf"\b{word}\s?(\d+)", text)
        return int(found[1]) if found else 1

    job = replace(job, tensor=ways("TP"), pipeline=ways("PP"), context=ways("CP"))
    lower = text.lower()
    whole = re.search(r"fsdp2?( full[ _]shard| \d|$|,| \()", lower) and "zero-1" not in lower
    if "zero-3" in lower or whole:
        job = replace(job, shard="zero3")
        over = re.search(r"fsdp2? (\d+)", lower)
        if over:
            job = replace(job, shard_over=int(over[1]) * job.context)
    elif "zero-2" in lower:
        job = replace(job, shard="zero2")
    elif "zero-1" in lower or "shards optimizer" in lower or "distributed Adam" in row.get("optimizer", ""):
        job = replace(job, shard="zero1")
    if "within 8" in lower:
        job = replace(job, shard_over=8)
    if row["framework"].startswith("LLMQ") and job.cards > 1:
        shard: Shard = "zero3" if "shard-weights" in lower else "zero1"
        job = replace(job, shard=shard, sharded_gradients="shard-gradients" in lower)
    if row["framework"].startswith("fms"):  # accelerate accumulates under no_sync
        job = replace(job, whole_gradients=True)
    qwen = row["framework"].startswith("HF Trainer (Qwen")
    if qwen and row["method"].startswith("full"):  # its script for all parameters is DeepSpeed ZeRO-3, on one card too
        job = replace(job, shard="zero3")
    elif qwen and "QLoRA" in row["method"]:  # and the one for QLoRA, ZeRO-2
        job = replace(job, shard="zero2")
    if job.pipeline > 1 and job.micro_batches == 1:  # what a rank is given is cut for the pipeline
        job = replace(job, micro_batches=job.micro_batch, micro_batch=1)
    if qwen and job.shard != "none":  # without autocast its loss stays in 16 bits: logits, shifted, softmax, two gradients
        job = replace(job, logit_bytes=10.0)
    deepspeed = qwen or "deepspeed" in row["framework"].lower()
    loaded = row["framework"].startswith("LitGPT")
    return replace(job, deepspeed=deepspeed and job.shard in ("zero2", "zero3"), loaded_whole=loaded)


def _kernels(job: Job, row: Row) -> Job:
    framework, other = row["framework"].lower(), row.get("other_settings", "").lower()
    if framework.startswith(("llmq", "surogate")):
        return replace(job, kernels="written", fused_loss=True, loss_chunks=_chunks(other))
    if framework.startswith(
        ("nemo", "internevo", "megatron", "nanotron", "roundpipe", "slideformer", "mosaicml", "unsloth", "lit-gpt")
    ):
        fused = framework.startswith(("unsloth", "slideformer", "roundpipe", "mosaicml"))
        kernels: Kernels = "fused" if framework.startswith("unsloth") else "compiled"
        return replace(
            job, kernels=kernels, fused_loss=fused, loss_chunks=8 if fused and not framework.startswith("mosaicml") else 1
        )
    if "liger" in other or "liger" in framework:
        return replace(job, kernels="fused", fused_loss=True, loss_chunks=8)
    compiled = "compile" in other and "eager" not in other
    chunked = "chunked ce" in other or (framework.startswith("torchtune") and "packed dataset" in other)
    return replace(job, kernels="compiled" if compiled else "eager", loss_chunks=8 if chunked else 1)


def _chunks(other: str) -> int:
    found = re.search(r"lmhead-chunks=(\d+)", other)
    return int(found[1]) if found else 4


def _method(job: Job, row: Row) -> Job:
    if row.get("method_class", "full") == "full" or row["method"].startswith("full"):
        return job
    shape, rank = job.shape, int(row.get("lora_rank") or 8)
    width, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    h, f = shape.hidden, shape.ffn
    attention = [(h, width), (h, kv), (h, kv), (width, h)]
    feed = [(h, f), (h, f), (f, h)] if shape.gated else [(h, f), (f, h)]
    targets = attention + feed
    share = 1.0
    where = row.get("other_settings", "").lower() + row.get("notes", "").lower()
    if "attention projections" in where:
        targets, share = attention, 0.4
    elif "(q,v)" in where or row["framework"].startswith("LitGPT"):
        targets, share = [attention[0], attention[2]], 0.25
    trained = sum(rank * (a + b) for a, b in targets) * shape.layers
    if "emb" in row["method"]:
        trained += shape.vocab * h * (1 if shape.tied else 2)
    frozen, outside = _base(row)
    return replace(
        job,
        trained=trained,
        rank=rank,
        adapter_fraction=share,
        dequantized=frozen < 1.5,
        formats=replace(PURE, frozen=frozen, outside=outside),
    )


def _base(row: Row) -> tuple[float, float]:
    """Bytes of frozen parameters in blocks and outside."""
    text = (row["precision"] + " " + row["method"]).lower()
    outside = 4.0 if "fp32 embeddings" in text or "bnb" in text else 2.0
    if "int8" in text:
        return _INT8, outside
    if "int4" in text or "gptq" in text:
        return _GPTQ4 if "bnb" not in text else _NF4, outside
    if "nf4" in text:
        return _NF4_DOUBLE if "dq" in text or "double" in text else _NF4, outside
    return 2.0, 2.0


def _formats(job: Job, row: Row) -> Job:
    precision, optimizer, framework = row["precision"].lower(), row.get("optimizer", "").lower(), row["framework"].lower()
    matmul: Matmul = "bf16"
    if "fp8" in precision or "float8" in precision:
        matmul = "fp8"
    elif "fp16 accumulate" in precision:
        matmul = "fp16_fp16"
    found, workspace = _state(replace(job, matmul=matmul), row)
    if not job.full:  # adapters under autocast are fp32
        found = FP32_PARAMETERS if framework.startswith(("hf", "ms-swift", "fms", "unsloth")) else found
        found = replace(found, frozen=job.formats.frozen, outside=job.formats.outside)
    fused = (
        framework.startswith(("torchtune", "torchao", "litgpt", "lit-gpt", "torchtitan", "surogate")) or "paged" in optimizer
    )
    if "8-bit" in optimizer or "8bit" in optimizer:
        found, fused = replace(found, moments=2.0), True
    in_backward = "optimizer-in-backward" in row.get("other_settings", "") or "fused in backward" in row.get("notes", "")
    return replace(
        job,
        formats=found,
        matmul=matmul,
        update_workspace=0.0 if fused or not job.full else workspace,
        update_in_backward=in_backward,
    )


def _state(job: Job, row: Row) -> tuple[Formats, float]:
    """(formats of trained parameters, bytes a parameter that the update takes for a moment)."""
    precision, framework = row["precision"].lower().replace("no mixed", ""), row["framework"].lower()
    if framework.startswith("llmq"):  # bf16 weights are their own masters, unless those are elsewhere or products take fp8
        fp8 = job.matmul == "fp8"
        return replace(PURE, working=1.0 if fp8 else 2.0, master=2.0 if fp8 or "offload-master" in row["offload"] else 0.0), 0.0
    if any(word in precision for word in ("bf16 everything", "pure", "bf16_master")):
        return PURE, 2.0
    if job.deepspeed or ("deepspeed" in framework and "zero" in row["parallelism"].lower()):
        return MIXED, 4.0
    if framework.startswith(("megatron", "nemo", "nanotron")):
        return MEGATRON, 0.0
    if any(word in precision for word in ("amp", "fp32 params", "mixed precision")):
        return FP32_PARAMETERS, 4.0
    wide = framework.startswith("internevo") or any(word in precision for word in ("mixed", "fp32 master", "fp32 adam"))
    return (MIXED, 4.0) if wide else (PURE, 2.0)


def _offload(job: Job, row: Row) -> Job:
    text = row["offload"].lower()
    if row["framework"].startswith("LLMQ"):
        words: dict[str, Offloaded] = {
            "offload-opt-m": "moments", "offload-opt-v": "moments", "offload-master": "master",
            "offload-residual": "activations", "offload-gradients": "gradients",
        }  # fmt: skip
        found = {place for word, place in words.items() if word in text}
        if "shard-weights" in row["parallelism"] and (job.cards == 1 or "master" in found):
            found.add("weights")
        return replace(job, offload=frozenset(found))
    if "paged" in row.get("optimizer", ""):
        return replace(job, offload=frozenset({"paged"}))
    found = set()
    if text.startswith("none") or "to cpu" not in text:
        return job
    if "optimizer" in text:
        found |= {"moments", "master", "update", "gradients"}
    if "params" in text:
        found.add("weights")
    if "activations" in text:
        found.add("activations")
    return replace(job, offload=frozenset(found))


def _policy(job: Job, row: Row) -> Job:
    text = row["activation_checkpointing"].lower()
    if "fsdp default" in text and job.cards > 1:  # LitGPT's strategy checkpoints its blocks
        return replace(job, policy="recompute")
    if text.startswith("selective"):
        return replace(job, policy="selective")
    if text.startswith(("full", "recompute-block", "as needed", "tool default")) or "full" in text:
        return replace(job, policy="recompute")
    if text.startswith("recompute"):
        shape = job.shape
        width, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        parts = {
            "recompute-ffn": 2 * shape.ffn, "recompute-swiglu": shape.ffn, "recompute-norm": 2 * shape.hidden,
            "recompute-att": width, "recompute-qkv": width + 2 * kv,
        }  # fmt: skip
        gone = sum(numbers for word, numbers in parts.items() if word in text)
        gone += shape.ffn if "recompute-ffn" in text and "swiglu" not in text else 0
        return replace(job, policy="keep", kept_share=1.0 - gone / block_numbers(job))
    return replace(job, policy="keep")


def _network(job: Job, row: Row) -> Network:
    text = row.get("interconnect", "").lower()
    card = job.card
    outside = 0.0  # of a whole box: a ring crosses between two boxes once, whatever the number of its cards there
    found = re.search(r"(\d+)(?:-(\d+))? gb/s", text)
    if found and job.cards > job.cards_a_box:
        gigabits = float(found[2] or found[1])
        outside = gigabits / 8 * 1e9 * 0.8 * (job.cards_a_box if "per gpu" in text else 1)
        if "4x100" in text:
            outside *= 4
    elif job.cards > job.cards_a_box:
        outside = 6e9 if "tcp" in text else 100e9 * 0.8
    if "nvlink" in text.replace("no nvlink", ""):
        return Network(inside=(card.nvlink_bytes_s or 600e9) / 2 * 0.75, outside=outside)
    inside = card.link_bytes_s * (0.75 if card.peer_to_peer else 0.5)
    if "copy-engine" in text or "memcpy" in row.get("other_settings", ""):
        inside = card.link_bytes_s * 0.85
    if "few lanes" in text:
        inside *= 0.25
    return Network(inside=inside, outside=outside)
