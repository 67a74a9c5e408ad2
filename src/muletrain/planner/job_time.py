"""Time of a Job's step by part, on catalogue rates.

matmul        FLOPs of each matrix forward, for its input's gradient and for its own if it is trained; recomputed ones again.
              Rate: a share of the dense peak, less for products too small to fill the card
attention     4 x s^2 / 2 x width forward, 2.5 times that back, again where recomputed
elementwise   numbers that other kernels read and write: 9h + 2(w + k) + 3f forward, 11h + 2(w + k) + 5f back; eager 3 times
head          logits passed over: fused 4 times in 16 bits, else 2.5 times their bytes of memory
dequantize    4.5 bytes a frozen parameter for each use
starts        kernels of eager code x the time between two, as far as that is longer than their work
optimizer     bytes of state read and written by an update
transfers     to and from the host, and between cards; `exposed` is what does not hide behind compute
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from muletrain.catalog.gpus import GpuSpec
from muletrain.planner.assumptions import Assumptions
from muletrain.planner.job import Job, Matmul
from muletrain.spec.errors import InputError

STARTS = ((45, 110), (14, 34))
"""Kernels of a block, forward and back: eager, compiled."""
WAVE_TOKENS, WAVE_OUTPUTS = 128, 256
"""A tile of a large product's output, which one multiprocessor makes."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step."""

    matmul_s: float = 0.0
    attention_s: float = 0.0
    elementwise_s: float = 0.0
    head_s: float = 0.0
    dequantize_s: float = 0.0
    starts_s: float = 0.0
    optimizer_s: float = 0.0
    bubble_s: float = 0.0
    transfer_s: float = 0.0
    """To and from the host, exposed."""
    communication_s: float = 0.0
    """Between cards, exposed."""
    other_s: float = 0.0

    @property
    def step_s(self) -> float:
        """All of it."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


def product_rate(card: GpuSpec, matmul: Matmul, assumed: Assumptions, power_w: float = 0.0) -> float:
    """FLOP/s of large products. Raises InputError where the card has no units for the format."""
    peak: float = {
        "bf16": card.flops.get("bf16", 0.0),
        "fp16": card.flops.get("fp16", 0.0),
        "fp16_fp16": card.fp16_fp16_flops,
        "fp8": card.flops.get("bf16", 0.0) if "fp8" in card.flops else 0.0,
    }[matmul]
    if not peak:
        raise InputError(f"{card.name} has no {matmul.partition('_')[0]} tensor units; use another precision or card")
    share = assumed.product_geforce if card.geforce else assumed.product
    held = share * peak
    if not card.geforce:
        held = min(held, (power_w or card.tdp_w) * FLOPS_A_WATT.get(card.architecture.split()[-1][:2], 1.1e12))
    elif power_w:
        held *= min(1.0, power_w / card.tdp_w) ** 0.5
    if matmul == "fp8":
        held *= assumed.fp8_over_16 * (1.0 if card.geforce else 0.88)  # power again: 1.77 measured on an H100 (MAMF table)
    return held


FLOPS_A_WATT = {"AD": 0.66e12, "GA": 0.68e12}
"""Sustained 16-bit products a watt where power is what limits full-rate cards."""


def step_time(job: Job, assumed: Assumptions) -> StepTime:
    """One step, all micro-batches, update included. Raises InputError for a number format that the card does not have."""
    compute = _micro_batch(job, assumed)
    m = job.micro_batches
    compute_s = sum(compute.values()) * m
    bubble = compute_s * (job.pipeline - 1) / max(1, m) if job.pipeline > 1 else 0.0
    optimizer = _optimizer_s(job, assumed)
    transfer = _transfer_s(job, assumed, compute_s)
    communication = _communication_s(job, assumed, compute_s)
    known = compute_s + bubble + optimizer + transfer + communication
    return StepTime(
        **{name: value * m for name, value in compute.items()},
        optimizer_s=optimizer,
        bubble_s=bubble,
        transfer_s=transfer,
        communication_s=communication,
        other_s=known * (assumed.other - 1),
    )


def _micro_batch(job: Job, assumed: Assumptions) -> dict[str, float]:
    """Seconds of one micro-batch on one card, by part."""
    again = _again(job)
    bandwidth = job.card.bandwidth_bytes_s * assumed.memory_share
    parts = {
        "matmul_s": _matmul_s(job, assumed, again),
        "attention_s": _attention_s(job, assumed, again),
        "elementwise_s": 2.0 * job.tokens * job.shape.layers * _passed_numbers(job, assumed, again) / job.split / bandwidth,
        "dequantize_s": 0.0,
    }
    if job.dequantized:  # read in 4 bits, written in 16, read by the product
        parts["dequantize_s"] = (2 + again) * 4.5 * sum(job.shape.block_sizes) / job.split / bandwidth
    starts = 0.0
    if job.kernels != "written":
        forward, backward = STARTS[job.kernels == "compiled"]
        kernels = (forward * (1 + again) + backward) * job.shape.layers / job.pipeline
        kernels *= 1 + 0.9 * job.adapter_fraction if job.rank else 1.0
        starts = max(0.0, kernels * assumed.kernel_s - sum(parts.values()))
    return parts | {"head_s": _head_s(job, assumed), "starts_s": starts}


def _matmul_s(job: Job, assumed: Assumptions, again: float) -> float:
    """Products of all blocks: forward, again where recomputed, the inputs' gradients, and the matrices' own if trained."""
    rate = _rate(job, job.matmul, assumed)
    blocks = job.shape.matmul_parameters - job.shape.vocab * job.shape.hidden
    adapters = 6.0 * job.trained * job.tokens if job.rank else 0.0
    flops = 2.0 * blocks * job.tokens * (1 + again + (2.0 if job.full else 1.0)) + adapters
    return flops / job.split / rate / filled(job)


def _rate(job: Job, matmul: Matmul, assumed: Assumptions) -> float:
    known = product_rate(job.card, matmul, assumed, job.power_w)
    if not job.product_flops_s:
        return known
    return job.product_flops_s * (known / product_rate(job.card, "bf16", assumed, job.power_w) if matmul == "fp8" else 1.0)


def _head_s(job: Job, assumed: Assumptions) -> float:
    """Products of the head in 16 bits, and logits passed over: fused 8 bytes each, else 2.5 times what they take."""
    shape, t = job.shape, job.tokens
    rate = _rate(job, "bf16" if job.matmul == "fp8" else job.matmul, assumed)
    products = 2.0 * shape.vocab * shape.hidden * t * (3.0 if job.full else 2.0) / rate
    passes = 8.0 if job.fused_loss else 2.5 * assumed.logits_bytes
    passed = passes * t * shape.vocab / (job.card.bandwidth_bytes_s * assumed.memory_share)
    return (products + passed) / job.split


def _passed_numbers(job: Job, assumed: Assumptions, again: float) -> float:
    """Numbers a token and block that kernels other than products read and write in a micro-batch, backward included."""
    shape = job.shape
    turned = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    gate = 3 if shape.gated else 2
    forward = 9 * shape.hidden + turned + gate * shape.ffn
    backward = 11 * shape.hidden + turned + (gate + 2) * shape.ffn
    if job.matmul == "fp8":  # each operand is read, scaled and written once more
        operands = 3 * shape.hidden + shape.ffn
        forward, backward = forward + 2 * operands, backward + 3 * operands
    moved = (assumed.eager_passes if job.kernels == "eager" else 1.0) * (forward * (1 + again) + backward)
    if job.rank:
        beside = _adapter_numbers(job)
        moved += (1.5 if job.kernels == "eager" else 1.0) * (beside * (1 + again) + 1.5 * beside)
    return moved


def _adapter_numbers(job: Job) -> float:
    """Numbers a token that adapters read and write in a block's forward: each one's input, and the output it is added to."""
    shape = job.shape
    width, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inputs = 3 * shape.hidden + width + (2 * shape.hidden if shape.gated else shape.hidden) + shape.ffn
    outputs = width + 2 * kv + shape.hidden + (2 if shape.gated else 1) * shape.ffn + shape.hidden
    return job.adapter_fraction * (inputs + 2 * outputs)


def _again(job: Job) -> float:
    """Share of a block's forward that is computed twice."""
    if job.policy == "recompute":
        return 1.0 if job.kernels == "eager" else 0.85
    if job.policy == "selective":
        return 0.35
    return 0.7 * (1 - job.kept_share)


def filled(job: Job) -> float:
    """How full products keep the card: tiles over whole waves of multiprocessors, and the start of each sum."""
    shape = job.shape
    tiles = max(1.0, job.tokens / WAVE_TOKENS) * max(1.0, shape.hidden / job.tensor / WAVE_OUTPUTS)
    waves = tiles / multiprocessors(job.card)
    return waves / (waves + 0.35) * shape.hidden / (shape.hidden + 160)


def multiprocessors(card: GpuSpec) -> float:
    """Their number, from the dense 16-bit peak: 2.5 TFLOP/s each on data-centre cards, 1.3 on GeForce (to a fifth)."""
    peak = card.flops.get("bf16") or card.flops.get("fp16", 1e14)
    return max(20.0, min(200.0, peak / (1.29e12 if card.geforce else 2.6e12)))


def _attention_s(job: Job, assumed: Assumptions, again: float) -> float:
    shape = job.shape
    peak = job.card.flops.get("bf16") or job.card.flops.get("fp16", 1e14)
    slow = 2 / 3 if job.card.capability[0] >= 9 and job.kernels != "written" else 1.0
    limit = min(1.0, job.power_w / job.card.tdp_w) ** 0.5 if job.power_w else 1.0
    forward = shape.attention_flops_a_token(job.sequence) / 3.0 * job.tokens
    done = forward * (1 + again) / assumed.attention_forward + 2.5 * forward / assumed.attention_backward
    flash = done / (peak * slow * limit * assumed.attention) / job.split
    if job.flash:
        return flash
    bandwidth = job.card.bandwidth_bytes_s * assumed.memory_share
    return flash + 10.0 * shape.heads * job.sequence * 2.0 * job.tokens * shape.layers * (2 + again) / job.split / bandwidth


def _optimizer_s(job: Job, assumed: Assumptions) -> float:
    shared = job.shards if job.shard != "none" else 1
    count = job.trained_parameters / job.split / shared
    f = job.formats
    if "update" in job.offload:
        boxes = max(1, -(-job.cards // job.cards_a_box))
        return job.trained_parameters / boxes * assumed.host_update_s
    moved = count * (2 * f.moments + 2 * max(f.master, f.working if not f.master else 0.0) + 2 * f.gradient + f.working)
    return moved / (job.card.bandwidth_bytes_s * assumed.memory_share)


def _transfer_s(job: Job, assumed: Assumptions, compute_s: float) -> float:
    """What the host link adds: state for the update, weights a micro-batch, activations; the last two beside compute."""
    if not job.offload:
        return 0.0
    link = job.card.link_bytes_s
    n = job.shards if job.shard != "none" else 1
    count, f = job.trained_parameters / job.split / n, job.formats
    state = 0.0
    if "update" in job.offload:
        state = count * (f.gradient + f.working) / link
    else:
        if "moments" in job.offload:
            state += 2 * f.moments * count / link
        if "master" in job.offload:
            state += 2 * f.master * count / link
    weights = 0.0
    if "weights" in job.offload:
        frozen = f.frozen * sum(job.shape.block_sizes) if job.frozen_parameters else f.working * job.trained_parameters
        weights = 2 * frozen / n / link * job.micro_batches
    gradients = 0.0
    if "gradients" in job.offload:
        gradients = 2 * f.gradient * count / link * job.micro_batches
    inputs = 0.0
    if "activations" in job.offload:
        inputs = job.compute_bytes * job.shape.hidden * job.tokens * job.shape.layers * job.micro_batches / link
    beside = max(0.0, max(weights, gradients) + inputs - assumed.overlap * compute_s)
    return state + beside


def _communication_s(job: Job, assumed: Assumptions, compute_s: float) -> float:
    if job.cards == 1 or job.network is None:
        return 0.0
    n = job.shards if job.shard != "none" else job.data_parallel
    over = job.network.inside
    start = job.network.start_s
    if job.cards > job.cards_a_box:
        over = min(over, job.network.outside or over) if n * job.tensor > job.cards_a_box else over
        start = job.network.start_outside_s * max(1.0, math.log2(job.cards / job.cards_a_box))
    ring = (n - 1) / n if n > 1 else 0.0
    count = job.trained_parameters / job.split
    m, layers = job.micro_batches, job.shape.layers / job.pipeline
    f = job.formats
    width = 2.0 if job.full else f.frozen
    all_parameters = (job.shape.parameters if job.full else job.frozen_parameters) / job.split
    moved, collectives = 0.0, 0.0
    if job.shard == "zero3":
        gathers = 2.0
        moved = m * ring * (gathers * width * all_parameters + max(2.0, min(f.gradient, 4.0)) * count)
        collectives = 3 * m * layers
        hides = compute_s
    elif job.shard == "zero2" or job.sharded_gradients:
        moved = ring * (m * f.gradient * count + f.working * count)
        collectives = (m + 1) * layers
        hides = compute_s
    elif job.data_parallel > 1:
        moved = 2 * ring * min(f.gradient, 4.0) * count
        collectives = layers / 4
        hides = compute_s / m * 0.6
    else:
        hides = 0.0
    exposed = max(
        0.0, moved / over + collectives * start - (assumed.overlap_eager if job.kernels == "eager" else assumed.overlap) * hides
    )
    outer = _between_groups_s(job, count)
    return exposed + outer + _tensor_s(job, assumed, compute_s)


def _between_groups_s(job: Job, count: float) -> float:
    """Gradients between groups of cards that each hold the whole state."""
    if job.network is None or job.shard == "none" or job.shards >= job.data_parallel * job.context:
        return 0.0
    groups = job.data_parallel * job.context / job.shards
    rate = job.network.outside or job.network.inside
    return 2 * (groups - 1) / groups * min(job.formats.gradient, 4.0) * count / job.shards / rate


def _tensor_s(job: Job, assumed: Assumptions, compute_s: float) -> float:
    """Four sums of the hidden state a block and micro-batch, two more where forward is repeated; sends between stages;
    keys and values between cards that share a row."""
    if job.network is None:
        return 0.0
    shape, m = job.shape, job.micro_batches
    bytes_once = job.compute_bytes * shape.hidden * job.tokens
    total = 0.0
    if job.tensor > 1:
        sums = 4 + (2 if job.policy == "recompute" else 0)
        ring = 2 * (job.tensor - 1) / job.tensor
        total += m * shape.layers / job.pipeline * sums * (ring * bytes_once / job.network.inside + job.network.start_s)
    if job.pipeline > 1:
        total += 2 * m * bytes_once / job.tensor / (job.network.outside or job.network.inside)
    if job.context > 1:
        kv = 2 * job.compute_bytes * shape.kv_heads * shape.head_dim * job.tokens * (job.context - 1) * 3
        total += max(0.0, m * shape.layers * kv / job.network.inside - assumed.overlap * compute_s)
    return total
