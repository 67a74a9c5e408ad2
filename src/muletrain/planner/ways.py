"""The ways in which a model could be trained on a fleet: strategies, card counts, activations, number formats, offload.

A way that muletrain runs is described by the Footprint that `mule train` plans with, so that its memory is the same to the
byte. One that it does not run in this version is described by a Job and marked "paper only". Micro-batches are as large as fit,
because larger ones are never slower: the search tries them from the largest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from muletrain.catalog.gpus import GpuSpec
from muletrain.planner.assumptions import Assumptions
from muletrain.planner.fleet import Fleet, weakest
from muletrain.planner.footprint import Footprint
from muletrain.planner.job import MIXED, Formats, Job, Matmul, Network, Offloaded, Policy, Shard
from muletrain.spec.model_shape import ModelShape
from muletrain.spec.plan import AdapterPlan, StreamingPlan
from muletrain.spec.recipe import OptimizerState, StrategyName

Method = Literal["full", "lora", "qlora"]
LOSS_CHUNK = 1024
NF4_BYTES = 0.516
"""A parameter in 4 bits with doubly quantized scales (Dettmers et al. 2023)."""
OWN = Formats(working=2, gradient=4, master=4, moments=8)
"""muletrain on a card: gradients are summed in fp32."""
MICRO_BATCHES = (32, 16, 8, 4, 2, 1)
WAVES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Work:
    """What is to be trained."""

    shape: ModelShape
    sequence: int
    tokens: int
    """In all."""
    tokens_per_step: int
    method: Method = "full"
    rank: int = 16
    compute: Literal["bf16", "fp16"] = "bf16"

    @property
    def sequences(self) -> int:
        """Rows of a step."""
        return max(1, round(self.tokens_per_step / self.sequence))

    @property
    def adapter(self) -> AdapterPlan:
        """Of `rank` on all linear layers of the blocks; none with method full."""
        if self.method == "full":
            return AdapterPlan()
        shape = self.shape
        targets = tuple(dict.fromkeys(linear.name.rpartition(".")[2] for linear in shape.linears))
        numbers = sum(linear.inputs + linear.outputs for linear in shape.linears)
        return AdapterPlan(
            kind="lora", rank=self.rank, alpha=2.0 * self.rank, targets=targets, parameters=self.rank * shape.layers * numbers
        )


@dataclass(frozen=True)
class Way:
    """One way, everything decided."""

    name: str
    strategy: str
    cards: int
    """Of one box."""
    boxes: int
    card: GpuSpec
    """The weakest of those used."""
    notes: tuple[str, ...]
    """What holds other cards back."""
    micro_batch: int
    rounds: int
    """Micro-batches on the busiest card."""
    activations: Policy
    job: Job
    """For the time of all but streamed ways, and for the memory of those on paper."""
    run: Footprint | None = None
    """For what muletrain runs."""
    paper: str = ""
    """Why it is on paper only; empty: `mule train` runs it."""
    keys: dict[str, str] = field(default_factory=dict)
    """The recipe's keys that ask for it."""

    @property
    def all_cards(self) -> int:
        """In all boxes."""
        return self.cards * self.boxes


def ways(work: Work, fleet: Fleet, assumed: Assumptions) -> Iterator[list[Way]]:
    """Groups of ways that differ in micro-batch and layout only, the best first: of each the first that fits is wanted."""
    for count in card_counts(fleet):
        box = fleet.strongest(count)
        yield from _on(work, fleet, box, assumed)


def card_counts(fleet: Fleet) -> list[int]:
    """Cards of a box that are worth trying: all, one, halves, and each number at which the weakest one changes."""
    if fleet.boxes > 1:
        return [len(fleet.cards)]
    most = len(fleet.cards)
    counts = {most, 1} | {most // 2**n for n in range(1, 4) if most // 2**n}
    for count in range(1, most):
        if weakest(fleet.strongest(count))[0] != weakest(fleet.strongest(count + 1))[0]:
            counts.add(count)
    return sorted(counts, reverse=True)


def network_of(card: GpuSpec, count: int, fleet: Fleet, assumed: Assumptions) -> Network | None:
    """What `count` such cards of a box talk over; None for one card alone."""
    if count * fleet.boxes == 1:
        return None
    if card.nvlink_bytes_s and (not card.nvlink_pair or count <= 2):
        inside = card.nvlink_bytes_s / 2 * assumed.nvlink_share
    elif card.peer_to_peer:
        inside = card.link_bytes_s * assumed.peer_share
    else:  # each byte is written to host memory and read again
        inside = min(card.link_bytes_s * assumed.through_host_share, assumed.host_memory_bytes_s / 2 / count)
    inside = _measured_peers(fleet, inside)
    return Network(inside=inside, outside=fleet.network_bytes_s)


def _measured_peers(fleet: Fleet, otherwise: float) -> float:
    measured = fleet.machine.measured
    rates = [peer.bytes_s.median for peer in measured.peers if peer.equal] if measured else []
    return min(rates) if rates else otherwise


def _on(work: Work, fleet: Fleet, box: tuple[GpuSpec, ...], assumed: Assumptions) -> Iterator[list[Way]]:
    card, notes = weakest(box)
    count = len(box) * fleet.boxes
    base = Way("", "", len(box), fleet.boxes, card, notes, 1, 1, "keep", _job(work, fleet, card, len(box), assumed))
    own: list[tuple[str, Shard]] = [("resident", "none")]
    if count > 1:
        own += [("zero1", "zero1"), ("zero2", "zero2"), ("zero3", "zero3")]
    quantized = work.method == "qlora"
    for strategy, shard in own:
        for policy in ("keep", "recompute"):
            yield _sized(work, base, strategy, shard, policy, paper="QLoRA is not built yet" if quantized else "")
    if work.method == "full":
        moments: tuple[OptimizerState, ...] = ("fp32", "bf16", "8bit")
        yield [way for state in moments for way in _streamed(work, base, state)]
        yield from _on_paper(work, base)


def _job(work: Work, fleet: Fleet, card: GpuSpec, count: int, assumed: Assumptions) -> Job:
    """What all ways on these cards share."""
    trained = work.adapter.parameters
    formats = replace(OWN, frozen=NF4_BYTES if work.method == "qlora" else 2.0)
    return Job(
        shape=work.shape,
        card=card,
        sequence=work.sequence,
        micro_batch=1,
        cards=count * fleet.boxes,
        cards_a_box=count,
        network=network_of(card, count, fleet, assumed),
        formats=formats,
        trained=trained,
        rank=work.rank if trained else 0,
        dequantized=work.method == "qlora",
        matmul=work.compute,
        fused_loss=True,
    )


def _rows(work: Work, copies: int, job: Job) -> Iterator[tuple[Job, int]]:
    """`job` with each micro-batch that a step has rows for, the largest first, and how many come one after another."""
    for micro_batch in MICRO_BATCHES:
        if micro_batch * copies <= work.sequences or micro_batch == 1:
            rounds = max(1, -(-work.sequences // (micro_batch * copies)))
            chunks = max(1, micro_batch * work.sequence // LOSS_CHUNK)
            yield replace(job, micro_batch=micro_batch, micro_batches=rounds, loss_chunks=chunks), rounds


def _sized(work: Work, base: Way, strategy: str, shard: Shard, policy: Policy, paper: str = "") -> list[Way]:
    """What muletrain runs without streaming."""
    found = []
    for job, rounds in _rows(work, base.job.data_parallel, replace(base.job, shard=shard, policy=policy)):
        keys = {
            "memory.strategy": strategy,
            "memory.activations": policy,
            "train.micro_batch": str(job.micro_batch),
            "parallel.workers": str(base.cards),
        }
        if work.method == "lora":
            keys |= {"model.adapter.kind": "lora", "model.adapter.rank": str(work.rank)}
        several = f" on {base.all_cards} cards" if base.all_cards > 1 else ""
        name = f"{strategy}{several}, {'activations kept' if policy == 'keep' else 'blocks recomputed'}"
        run = None if work.method == "qlora" else _footprint(work, base, strategy, policy, job, StreamingPlan())
        reason = paper or ("several boxes are not built yet" if base.boxes > 1 else "")
        found.append(
            replace(
                base,
                name=name,
                strategy=strategy,
                micro_batch=job.micro_batch,
                rounds=rounds,
                activations=policy,
                job=job,
                run=run,
                keys=keys,
                paper=reason,
            )
        )
    return found


def _footprint(work: Work, base: Way, strategy: str, policy: Policy, job: Job, streaming: StreamingPlan) -> Footprint:
    strategies: dict[str, StrategyName] = {name: name for name in ("resident", "zero1", "zero2", "zero3", "streamed")}
    return Footprint(
        strategy=strategies[strategy],
        activations="keep" if policy == "keep" else "recompute",
        compute=work.compute,
        compiled=True,
        device="cuda",
        workers=base.all_cards,
        micro_batch=job.micro_batch,
        micro_batches=max(1, -(-work.sequences // job.micro_batch)),
        sequence_length=work.sequence,
        loss_chunk=LOSS_CHUNK,
        streaming=streaming,
        adapter=work.adapter,
    )


def _streamed(work: Work, base: Way, moments: OptimizerState) -> list[Way]:
    """Few waves first: each takes parameters over the link twice."""
    found = []
    gradients: Literal["master", "bf16"] = "bf16" if work.compute == "bf16" else "master"
    for waves in WAVES:
        for job, rounds in _rows(work, base.job.data_parallel, replace(base.job, policy="recompute")):
            if waves > rounds or job.micro_batch > 8:
                continue
            slices = (1,) * base.all_cards if base.all_cards > 1 else ()
            streaming = StreamingPlan(waves=waves, moments=moments, gradients=gradients, slices=slices)
            several = f" on {base.all_cards} cards" if base.all_cards > 1 else ""
            keys = {
                "memory.strategy": "streamed",
                "train.micro_batch": str(job.micro_batch),
                "train.optimizer.state": moments,
                "memory.waves": str(waves),
                "parallel.workers": str(base.cards),
            }
            found.append(
                replace(
                    base,
                    name=f"streamed{several}, {moments} moments",
                    strategy="streamed",
                    micro_batch=job.micro_batch,
                    rounds=rounds,
                    activations="recompute",
                    job=job,
                    keys=keys,
                    run=_footprint(work, base, "streamed", "recompute", job, streaming),
                    paper="several boxes are not built yet" if base.boxes > 1 else "",
                )
            )
    return found


def _on_paper(work: Work, base: Way) -> Iterator[list[Way]]:
    """What others offer, and what is not built here yet."""
    count = base.cards
    away: frozenset[Offloaded] = frozenset({"gradients", "master", "moments", "update"})
    adam = replace(base.job, formats=MIXED, policy="recompute", deepspeed=True, offload=away)
    yield _paper(work, base, "zero2 with DeepSpeed's CPU Adam", replace(adam, shard="zero2"), "engine: deepspeed")
    everything = replace(adam, shard="zero3", offload=away | {"weights"})
    yield _paper(work, base, "zero3 with DeepSpeed, parameters on the host too", everything, "engine: deepspeed")
    if count > 1:
        tensor = replace(base.job, tensor=count, policy="recompute", shard="zero1" if base.boxes > 1 else "none")
        if work.shape.heads % count == 0 and work.shape.kv_heads % count == 0:
            yield _paper(work, base, f"tensor parallel over {count}", tensor, "tensor parallelism")
        pipeline = replace(base.job, pipeline=count, policy="recompute", shard="zero1" if base.boxes > 1 else "none")
        yield _paper(work, base, f"pipeline of {count}", pipeline, "pipeline parallelism")
    if base.card.capability >= (8, 9) and "fp8" in base.card.flops and work.compute == "bf16":
        matmul: Matmul = "fp8"
        shard: Shard = "zero2" if base.all_cards > 1 else "none"
        job = replace(base.job, policy="recompute", shard=shard, matmul=matmul)
        yield _paper(work, base, f"{'zero2' if shard == 'zero2' else 'resident'} with fp8 products", job, "fp8")


def _paper(work: Work, base: Way, name: str, job: Job, missing: str) -> list[Way]:
    several = f" on {base.all_cards} cards" if base.all_cards > 1 and "over" not in name and "pipeline" not in name else ""
    return [
        replace(
            base,
            name=name + several,
            strategy=name.partition(" ")[0],
            micro_batch=sized.micro_batch,
            rounds=rounds,
            activations=job.policy,
            job=sized,
            paper=f"{missing} is not built yet",
        )
        for sized, rounds in _rows(work, job.data_parallel, job)
    ]
