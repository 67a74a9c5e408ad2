"""Memory of a Job as a Ledger: each card (the one with most) and the host of one box.

A step needs most at one of two moments: the start of the last backward, when all activations are alive, and the update, when
all gradients are. The ledger is that of the larger one. h hidden, w attention width, k key and value width, f feed-forward, V
vocabulary, t tokens on the card, N cards that share state.

  states        bytes a parameter (planner.job.Formats), cut by what is sharded and by tensor and pipeline parallel
  gathered      zero3: two blocks and what is outside blocks (FSDP), or up to a billion parameters (DeepSpeed)
  activations   keep: layers x t x 2 (4h + 2w + 2k + 3f), 2f without a gate; eager more by planner.assumptions.
                recompute: layers x t x 2h, and one whole block, or the logits if they are more, as they are gone by then.
                selective: every other product's output and attention's, 2 (2h + 2w + k + f), and one block.
                Adapters add the rank and, in eager code, the dropped-out input of each adapted matrix
  attention     without flash 4 x heads x sequence x t a block, scores and weights; eager twice that
  logits        t x V x 16 bytes (planner.assumptions); fused 2; in n chunks 1/n of it
"""

from __future__ import annotations

from muletrain.planner.assumptions import Assumptions
from muletrain.planner.job import Job
from muletrain.spec.ledger import Ledger, LedgerItem, Place

Parts = dict[str, tuple[float, str]]
"""part -> (bytes, how)."""
HOST_PROCESS_BYTES = 2 * 2**30


def job_ledger(job: Job, assumed: Assumptions) -> Ledger:
    """All parts. `reserved` and `context` are items of their own: sums without them are what the trainer's tensors take."""
    static = _states(job, assumed)
    busy, update = static | _busy(job, assumed), static | _update(job)
    parts = max(busy, update, _loading(job), key=_total)
    kept = (assumed.reserved - 1) * (busy["activations"][0] + busy["logits"][0])
    if job.varied_lengths:
        kept = (assumed.reserved_varied - 1) * busy["logits"][0]
    elif parts is not busy:
        kept = 0.0
    room = job.card.memory_bytes - _total(parts) - assumed.context_bytes  # under pressure what is not in use is given back
    parts["fragmentation"] = (max(0.0, min(kept, room)), "held by the allocator and not in use")
    if "paged" in job.offload:
        there = job.card.memory_bytes - _total(parts) - assumed.context_bytes
        paged = job.formats.moments * job.trained_parameters / job.split / (job.shards if job.shard != "none" else 1)
        parts["paged"] = (max(0.0, min(paged, there)), "moments that the driver moves by the page, as far as there is room")
    context = assumed.context_bytes + (assumed.communication_bytes if job.cards > 1 else 0)
    parts["context"] = (context, "CUDA" + (" and NCCL" if job.cards > 1 else ""))
    items = [_item("card", part, size, how) for part, (size, how) in parts.items() if size >= 1]
    items += [_item("host", part, size, how) for part, (size, how) in host_parts(job).items() if size >= 1]
    return Ledger(items=tuple(items))


def allocated_bytes(ledger: Ledger) -> int:
    """What the trainer's tensors take on a card: neither context nor what the allocator holds beside."""
    return sum(i.size_bytes for i in ledger.items if i.place == "card" and i.part not in ("context", "fragmentation", "paged"))


def reserved_bytes(ledger: Ledger) -> int:
    """The same with what the allocator holds."""
    return sum(i.size_bytes for i in ledger.items if i.place == "card" and i.part not in ("context", "paged"))


def device_bytes(ledger: Ledger) -> int:
    """All of a card, as its driver sees it."""
    return ledger.total("card")


def needed_bytes(job: Job, assumed: Assumptions) -> int:
    """What must be there: an allocator under pressure gives back what is not in use, and pages move out."""
    context = assumed.context_bytes + (assumed.communication_bytes if job.cards > 1 else 0)
    return round(allocated_bytes(job_ledger(job, assumed)) + context)


def block_numbers(job: Job) -> float:
    """16-bit numbers a token that a compiled block keeps for backward."""
    shape = job.shape
    width, value = shape.heads * shape.head_dim, shape.heads * (shape.value_dim or shape.head_dim)
    kv_width = shape.kv_heads * (shape.head_dim + (shape.value_dim or shape.head_dim))
    numbers: float = 4 * shape.hidden + width + value + kv_width + (3 if shape.gated else 2) * shape.ffn + 2 * shape.latent
    if job.matmul == "fp8" and job.kernels == "written":  # what products take is kept as they take it
        numbers -= (2 * shape.hidden + value + shape.ffn) / 2
    return numbers


def activation_bytes(job: Job, assumed: Assumptions) -> tuple[float, float]:
    """(all blocks of this card, one whole block while it is computed again or back), for what is in flight."""
    shape, c = job.shape, job.compute_bytes
    factor = 1.0
    if job.kernels == "eager":
        factor += (assumed.eager_activations - 1) * (1.0 if shape.gated else 1 / 3)
    whole = c * block_numbers(job) * factor
    if job.rank:
        adapted = 3 * shape.hidden + shape.ffn / 2  # mean input of an adapted matrix, four in attention and three beside
        whole += 7 * job.adapter_fraction * c * (job.rank + (adapted / 3.5 if job.kernels == "eager" else 0))
    if not job.flash:
        whole += 4.0 * shape.heads * job.sequence * (2.0 if job.kernels == "eager" else 1.0)
    one = whole * job.tokens / job.tensor
    width = shape.heads * shape.head_dim
    kept = {
        "keep": whole * job.kept_share,
        "selective": c * (2 * shape.hidden + 2 * width + shape.kv_heads * shape.head_dim + shape.ffn),
        "recompute": c * shape.hidden * (0.0 if "activations" in job.offload else 1.0),
    }[job.policy]
    layers = -(-shape.layers // job.pipeline)
    in_flight = min(job.pipeline, job.micro_batches)
    held = kept * job.tokens / job.tensor * layers * in_flight
    return held, one if job.policy != "keep" or job.kept_share < 1 else 0.0


def logits_bytes(job: Job, assumed: Assumptions) -> float:
    """At once."""
    plain = assumed.compiled_logits_bytes if job.kernels == "compiled" else assumed.logits_bytes
    a_logit = 2.0 if job.fused_loss else job.logit_bytes or plain
    return a_logit * job.tokens * job.shape.vocab / job.loss_chunks / job.tensor


def host_parts(job: Job) -> Parts:
    """Of one box: what is offloaded, and each process."""
    boxes = max(1, -(-job.cards // job.cards_a_box))
    count, f = job.trained_parameters / boxes if job.shard != "none" else job.trained_parameters, job.formats
    parts: Parts = {}
    if "weights" in job.offload:
        frozen = job.frozen_parameters * f.frozen
        parts["parameters"] = (f.working * count + frozen, f"{f.working:g} bytes x trained parameters, and those frozen")
    if "gradients" in job.offload or "update" in job.offload:
        wide = max(f.gradient, 4.0) if "update" in job.offload else f.gradient
        parts["gradients"] = (wide * count, f"{wide:g} bytes x trained parameters")
    if "master" in job.offload:
        parts["master"] = (f.master * count, f"{f.master:g} bytes x trained parameters")
    if "moments" in job.offload:
        parts["moments"] = (f.moments * count, f"{f.moments:g} bytes x trained parameters, both")
    if "activations" in job.offload:
        here = min(job.cards, job.cards_a_box)
        size = job.compute_bytes * job.shape.hidden * job.tokens * job.shape.layers * here
        parts["inputs"] = (size, f"2 bytes x hidden x {job.tokens} tokens x {job.shape.layers} blocks x {here} cards")
    here = min(job.cards, job.cards_a_box)
    parts["context"] = (HOST_PROCESS_BYTES * here, f"2 GiB x {here} processes")
    return parts


def _states(job: Job, assumed: Assumptions) -> Parts:
    f, shape = job.formats, job.shape
    count, split = job.trained_parameters, job.split
    n3 = job.shards if job.shard == "zero3" else 1
    n1 = job.shards if job.shard != "none" else 1
    parts: Parts = {}
    blocks = sum(shape.block_sizes)
    frozen = (f.frozen * blocks + f.outside * shape.outside_blocks) if job.frozen_parameters else 0.0
    if "weights" not in job.offload:
        size = (frozen + f.working * count) / split / n3
        parts["parameters"] = (size, _cut(f"{f.working:g} bytes a trained parameter", n3 * split, frozen))
    gathered = _gathered(job, assumed)
    if gathered:
        parts["gathered"] = (gathered, "whole parameters while they are used")
    if job.deepspeed and job.shard == "zero2":
        parts["buckets"] = (assumed.bucket_bytes, "DeepSpeed's reduce buckets")
    if f.autocast:
        parts["copies"] = (
            f.autocast * count / split,
            f"{f.autocast:g} bytes x trained parameters, 16-bit copies of fp32 weights",
        )
    if "master" not in job.offload:
        parts["master"] = (f.master * count / split / n1, _cut(f"{f.master:g} bytes x trained parameters", n1 * split))
    if "moments" not in job.offload and "paged" not in job.offload:
        parts["moments"] = (f.moments * count / split / n1, _cut(f"{f.moments:g} bytes x trained parameters", n1 * split))
    return parts


def _cut(text: str, ways: int, frozen: float = 0.0) -> str:
    return text + (" and the frozen ones" if frozen else "") + (f" / {ways}" if ways > 1 else "")


def _gathered(job: Job, assumed: Assumptions) -> float:
    """zero3's whole units, and blocks that come from the host."""
    shape, f = job.shape, job.formats
    if job.shard != "zero3" and "weights" not in job.offload:
        return 0.0
    if job.shard == "zero3" and job.shards == 1 and "weights" not in job.offload:
        return 0.0
    of_block = f.frozen if job.frozen_parameters else 2.0
    outside = (f.outside if job.frozen_parameters else 2.0) * shape.outside_blocks
    whole = of_block * sum(shape.block_sizes) + outside
    if job.deepspeed:
        return min(assumed.live_bytes, whole) / job.split
    return min(2 * of_block * shape.block_parameters + outside, whole) / job.split


def _gradient_bytes(job: Job) -> tuple[float, float]:
    """(all gradients of this card, one unit's before it is shared out)."""
    f, count = job.formats, job.trained_parameters / job.split
    if "gradients" in job.offload:
        return 0.0, 2 * f.gradient * _unit(job)
    shared = job.shard in ("zero2", "zero3") or job.sharded_gradients
    if job.update_in_backward:
        return 0.0, f.gradient * _unit(job)
    if job.whole_gradients and job.micro_batches > 1:
        return f.gradient * count, f.gradient * _unit(job)
    if shared and job.shards > 1:
        return f.gradient * count / job.shards, f.gradient * _unit(job)
    return f.gradient * count, 0.0


def _unit(job: Job) -> float:
    """Trained parameters of the largest unit."""
    if job.full:
        return max(job.shape.block_parameters, job.shape.outside_blocks) / job.split
    return job.trained_parameters / job.shape.layers / job.split


def _busy(job: Job, assumed: Assumptions) -> Parts:
    """The start of the last backward."""
    held, one = activation_bytes(job, assumed)
    logits = logits_bytes(job, assumed)
    gradients, unit = _gradient_bytes(job)
    if job.micro_batches == 1:  # gradients appear while activations go
        gradients = max(0.0, min(gradients, gradients - held))
    return {
        "gradients": (gradients + unit, f"{job.formats.gradient:g} bytes a trained parameter"),
        "activations": (held + max(0.0, one - logits), f"{job.tokens} tokens, {job.shape.layers} blocks, {job.policy}"),
        "logits": (
            logits,
            f"{job.tokens} tokens x {job.shape.vocab} words" + (f" / {job.loss_chunks}" if job.loss_chunks > 1 else ""),
        ),
    }


def _update(job: Job) -> Parts:
    """The update: gradients are all there, activations gone."""
    gradients, unit = _gradient_bytes(job)
    shared = job.shards if job.shard != "none" else 1
    offloaded = "moments" in job.offload
    workspace = 0.0 if offloaded else job.update_workspace * job.trained_parameters / job.split / shared
    return {
        "gradients": (gradients + unit, f"{job.formats.gradient:g} bytes a trained parameter"),
        "workspace": (workspace, f"{job.update_workspace:g} bytes x parameters that this card updates"),
    }


def _loading(job: Job) -> Parts:
    """Before training, where a trainer loads the whole model on each card and shards it there."""
    if not job.loaded_whole or job.shard != "zero3":
        return {}
    f, shape = job.formats, job.shape
    whole = (
        f.frozen * sum(shape.block_sizes) + f.outside * shape.outside_blocks if job.trained else f.working * shape.parameters
    )
    return {
        "parameters": (whole / job.shards, f"a share of {job.shards}"),
        "gathered": (whole, "the whole model, while it is loaded"),
        "copies": (2 * 2.0 * max(shape.block_parameters, shape.outside_blocks), "units that are laid flat"),
    }


def _total(parts: Parts) -> float:
    return sum(size for size, _ in parts.values())


def _item(place: Place, part: str, size: float, how: str) -> LedgerItem:
    return LedgerItem(part=part, place=place, size_bytes=round(size), formula=how)
