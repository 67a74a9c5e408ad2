"""What one way takes: memory by part, time by part, power.

Ways that muletrain runs take their memory from the ledger that `mule train` plans with; streamed ones their time from the
schedule that the engine executes, walked at this box's rates. All others go by job_memory and job_time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from muletrain.planner.assumptions import Assumptions
from muletrain.planner.compute import compute_time
from muletrain.planner.fleet import Fleet
from muletrain.planner.footprint import Footprint
from muletrain.planner.job import Job
from muletrain.planner.job_memory import job_ledger
from muletrain.planner.job_time import filled, product_rate, step_time
from muletrain.planner.memory import ledger
from muletrain.planner.money import card_watts, wall_watts
from muletrain.planner.placement import USABLE
from muletrain.planner.prediction import streamed_timeline
from muletrain.planner.speed import COPY_S, DUPLEX_SHARE, KERNEL_S, Link, Speed, speed_of
from muletrain.planner.streamed import layouts, traffic_bytes
from muletrain.planner.ways import Way, Work
from muletrain.spec.ledger import Ledger


@dataclass(frozen=True)
class Estimate:
    """One way on a fleet. Seconds are of one step."""

    way: Way
    ledger: Ledger
    card_spare: int
    """Bytes left on each card; negative: short."""
    host_spare: int
    """Bytes left on a box; negative: short. Without a stated size: 0."""
    step_s: float
    parts_s: dict[str, float]
    tokens: int
    """Of a step, over all cards."""
    utilisation: float
    """Hardware FLOPs over the dense peak of all cards."""
    watts: float
    """At the socket, all boxes."""

    @property
    def fits(self) -> bool:
        """On every card and every host."""
        return self.card_spare >= 0 and self.host_spare >= 0

    @property
    def tokens_per_s(self) -> float:
        """Over all cards."""
        return self.tokens / self.step_s

    @property
    def communication(self) -> float:
        """Share of the step that waits for other cards or the host."""
        waits = ("communication", "transfer", "bubble")
        return sum(self.parts_s.get(part, 0.0) for part in waits) / self.step_s


def memory_of(way: Way, fleet: Fleet, assumed: Assumptions) -> tuple[Way, Ledger, int, int]:
    """(the way, laid out as it fits best, its ledger, spare bytes on a card, on a box)."""
    if way.run is not None and way.strategy == "streamed":
        way, needed = _laid_out(way, way.run)
        return way, needed, _card_spare(way, needed), _host_spare(fleet, needed)
    needed = ledger(way.job.shape, way.run) if way.run is not None else job_ledger(way.job, assumed)
    return way, needed, _card_spare(way, needed), _host_spare(fleet, needed)


def _laid_out(way: Way, run: Footprint) -> tuple[Way, Ledger]:
    """The layout with the most whole blocks on the card that fits there: fewer take less, so halving finds it."""
    every = layouts(way.job.shape, run.streaming, "auto")
    least = replace(run, streaming=every[-1])
    needed = ledger(way.job.shape, least)
    if _card_spare(way, needed) < 0:
        return replace(way, run=least), needed
    low, high = 0, len(every) - 1
    while low < high:
        middle = (low + high) // 2
        if _card_spare(way, ledger(way.job.shape, replace(run, streaming=every[middle]))) >= 0:
            high = middle
        else:
            low = middle + 1
    chosen = replace(run, streaming=every[low])
    return replace(way, run=chosen), ledger(way.job.shape, chosen)


def choose(group: list[Way], fleet: Fleet, assumed: Assumptions) -> Way:
    """Of ways that differ in micro-batch and layout: the first that fits, of streamed ones the one that is fastest by its
    compute and its transfers alone, wider formats before narrower ones where that is within 2 %. Else the one that is
    shortest of memory."""
    fitting: list[Way] = []
    closest, missing = group[-1], None
    done: set[tuple[str, int]] = set()
    for way in group:
        key = (way.run.streaming.moments, way.run.streaming.waves) if way.run is not None else ("", 0)
        if way.strategy == "streamed" and key in done:  # a smaller micro-batch would be no faster
            continue
        laid_out, _, card_spare, host_spare = memory_of(way, fleet, assumed)
        short = -min(card_spare, 0) - min(host_spare, 0)
        if not short:
            fitting.append(laid_out)
            done.add(key)
            if way.strategy != "streamed":
                return laid_out
        elif missing is None or short < missing:
            closest, missing = laid_out, short
    if not fitting:
        return closest
    times = [quick_s(way, fleet, assumed) for way in fitting]
    least = min(times)
    return next(way for way, time_s in zip(fitting, times, strict=True) if time_s <= 1.02 * least)


def quick_s(way: Way, fleet: Fleet, assumed: Assumptions) -> float:
    """A step's seconds without walking its schedule: of a streamed one the longer of compute and transfers."""
    if way.strategy != "streamed" or way.run is None:
        return step_time(_as_measured(way.job, fleet, assumed), assumed).step_s
    speed = assumed_speed(way, fleet, assumed)
    link = speed.link
    up, down = traffic_bytes(way.job.shape, way.run)
    transfers = max(up / link.up, down / link.down, (up + down) / link.both) if link else 0.0
    shorter, longer = sorted((compute_time(way.job.shape, way.run, speed).total_s, transfers))
    return (longer + 0.15 * shorter) * assumed.other  # what waits at the ends of a step, as walked schedules have it


def estimate(way: Way, fleet: Fleet, work: Work, assumed: Assumptions) -> Estimate:
    """Memory, time and power of a way that `choose` laid out. Raises InputError for a format that the cards do not have."""
    needed = ledger(way.job.shape, way.run) if way.run is not None else job_ledger(way.job, assumed)
    card_spare, host_spare = _card_spare(way, needed), _host_spare(fleet, needed)
    if way.strategy == "streamed" and way.run is not None:
        step_s, parts_s = _streamed_s(way, way.run, fleet, assumed)
    else:
        time = step_time(_as_measured(way.job, fleet, assumed), assumed)
        parts_s = {name.removesuffix("_s"): value for name, value in vars(time).items() if value}
        step_s = time.step_s
    tokens = work.sequences * work.sequence
    done = _flops(way, work) * tokens / step_s / way.all_cards
    peak = way.card.flops.get("fp8" if way.job.matmul == "fp8" else work.compute, 0.0) or 1.0
    utilisation = done / peak
    watts = wall_watts(_cards_w(way, fleet, utilisation), way.boxes, assumed)
    return Estimate(way, needed, card_spare, host_spare, step_s, parts_s, tokens, utilisation, watts)


def assumed_speed(way: Way, fleet: Fleet, assumed: Assumptions) -> Speed:
    """This card's rates for the streamed schedule: measured ones if there are any, else as job_time has them."""
    dtype = way.run.compute if way.run else "bf16"
    if fleet.machine.measured is not None:
        return speed_of(fleet.machine, dtype)
    card = way.card
    peak = card.flops.get(dtype, 0.0)
    slow = 2 / 3 if card.capability >= (9, 0) and not card.geforce else 1.0
    rate = product_rate(card, "fp16" if dtype == "fp16" else "bf16", assumed) * filled(way.job)
    link = min(card.link_bytes_s, assumed.host_memory_bytes_s / way.cards)
    return Speed(
        source=f"catalogue: {card.name}",
        products=(((1, 1, 1), rate),),
        attention_forward=(((1, 1), peak * slow * assumed.attention * assumed.attention_forward),),
        attention_backward=(((1, 1), peak * slow * assumed.attention * assumed.attention_backward),),
        memory_bytes_s=card.bandwidth_bytes_s * assumed.memory_share,
        kernel_s=KERNEL_S,
        link=Link(link, link, 2 * DUPLEX_SHARE * link, COPY_S),
    )


def _streamed_s(way: Way, run: Footprint, fleet: Fleet, assumed: Assumptions) -> tuple[float, dict[str, float]]:
    """The schedule of one of the workers, which all do alike."""
    shape = way.job.shape
    found = streamed_timeline(shape, run, assumed_speed(way, fleet, assumed))
    line, parts = found.line, compute_time(shape, run, found.speed)
    known = {
        "matmul": parts.matmul_s,
        "attention": parts.attention_s,
        "elementwise": parts.elementwise_s,
        "starts": parts.launch_s,
        "transfer": line.exposed_s,
    }
    other = line.step_s * (assumed.other - 1)
    return line.step_s + other, {part: value for part, value in (known | {"other": other}).items() if value}


def _as_measured(job: Job, fleet: Fleet, assumed: Assumptions) -> Job:
    """With the machine's own product, memory and link rates where they were measured."""
    measured = fleet.machine.measured
    rates = next((r for r in measured.compute if r.device == job.card.driver_name), None) if measured else None
    if rates is None or measured is None:
        return job
    dtype = "bf16" if job.matmul == "fp8" else job.matmul.partition("_")[0]
    best = max((rate.flops_s.median for rate in rates.matmuls if rate.dtype == dtype), default=0.0)
    card = replace(job.card, bandwidth_bytes_s=rates.memory_bytes_s.median / assumed.memory_share)
    return replace(job, card=card, product_flops_s=best)


def _flops(way: Way, work: Work) -> float:
    """Done for a token, recomputation included."""
    shape, job = work.shape, way.job
    blocks = shape.matmul_parameters - shape.vocab * shape.hidden
    forward = 2.0 * shape.matmul_parameters + shape.attention_flops_a_token(work.sequence) / 3
    backward = 2.0 * forward if job.full else forward + shape.attention_flops_a_token(work.sequence) / 3
    again = 2.0 * blocks + shape.attention_flops_a_token(work.sequence) / 3 if way.activations == "recompute" else 0.0
    return forward + backward + again


def _card_spare(way: Way, needed: Ledger) -> int:
    return round(USABLE * way.card.memory_bytes) - needed.total("card")


def _host_spare(fleet: Fleet, needed: Ledger) -> int:
    return fleet.ram_bytes - needed.total("host") if fleet.ram_bytes else 0


def _cards_w(way: Way, fleet: Fleet, utilisation: float) -> float:
    """Cards that wait for slower ones work less; cards not used idle at a tenth of their limit, if they are there at all."""
    used = fleet.strongest(way.cards)
    slowest = min(card.flops.get("bf16", 1.0) for card in used)
    busy = sum(card_watts(card.tdp_w, utilisation * slowest / card.flops.get("bf16", 1.0)) for card in used)
    return busy * way.boxes
