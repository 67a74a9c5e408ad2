"""Time that a model's own arithmetic takes on one device, by part: products, attention, passes over memory, starts.

All of one micro-batch. h hidden, w attention width, k key/value width, f feed-forward, V vocabulary, t tokens of a micro-batch,
c bytes of a number in the compute format, m in the master format.

  products     each matrix of a block once forward (t x in x out), once for its input's gradient, once for its own; recomputing
               spares the last, whose output nothing needs
  attention    over whole rows: packed documents are shorter and take less
  passes       numbers read and written by a block's other kernels, as a compiler fuses them. Forward: norms with the residual
               sums before them 6h, the last sum 3h, rotary 2(w + k), activation 3f. Backward: 11h, 2(w + k), 5f. Recomputing:
               forward without the last sum. Eager blocks make 3.5 times as many (norms in fp32 step by step, rotary in six)
  sums         a parameter's gradient joins the step's sum: c + m bytes for the first micro-batch, c + 2m for later ones
  head         three products a chunk of tokens; its logits are passed over four times; its gradient is summed over chunks in m
               bytes, rounded, scaled and summed over micro-batches
  adapter      its products are as thin as its rank, so their operands' passes are what takes time: of each adapted layer
               inputs + 4 outputs forward, 5 inputs + 2 outputs back; the model's own gradients and their sums fall away
  starts       operations x the time from one to the next, as far as that exceeds their work: a host that is slower than the
               device. Counted: 14 forward and 34 backward of a compiled block, 45 and 110 of an eager one

Rates come from planner.speed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from muletrain.planner.footprint import Footprint
from muletrain.planner.speed import Speed
from muletrain.planner.streamed import unit_parameters
from muletrain.schedule.rates import Rates, Span, UnitTime
from muletrain.spec.errors import InputError
from muletrain.spec.model_shape import ModelShape

EAGER_PASSES: Final = 3.5
POSITIONED: Final = ("gpt2", "bert")
"""Families with learned positions: nothing turns queries and keys."""
FUSED_QUERIES: Final = ("gpt2", "baichuan")
"""Families whose queries, keys and values come from one matrix."""
STARTS: Final = {True: (14, 34), False: (45, 110)}
"""Operations of a block forward and backward, by whether it is compiled."""


@dataclass(frozen=True)
class Parts:
    """Seconds by part."""

    matmul_s: float = 0.0
    attention_s: float = 0.0
    elementwise_s: float = 0.0
    launch_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All parts; they run one after another."""
        return self.matmul_s + self.attention_s + self.elementwise_s + self.launch_s

    def __add__(self, other: Parts) -> Parts:
        return Parts(
            self.matmul_s + other.matmul_s,
            self.attention_s + other.attention_s,
            self.elementwise_s + other.elementwise_s,
            self.launch_s + other.launch_s,
        )

    def times(self, count: float) -> Parts:
        """`count` of them."""
        return Parts(count * self.matmul_s, count * self.attention_s, count * self.elementwise_s, count * self.launch_s)


@dataclass(frozen=True)
class UnitParts:
    """One unit of the model and one micro-batch."""

    forward: Parts
    recompute: Parts = field(default_factory=Parts)
    input_gradient: Parts = field(default_factory=Parts)
    weight_gradient: Parts = field(default_factory=Parts)
    sums: Parts = field(default_factory=Parts)
    """Adding up parameter gradients: the same for any number of tokens."""

    def step(self, *, recompute: bool) -> Parts:
        """Forward and backward, all parameters trained."""
        total = self.forward + self.input_gradient + self.weight_gradient + self.sums
        return total + self.recompute if recompute else total


def block_time(shape: ModelShape, run: Footprint, speed: Speed) -> UnitParts:
    """Of one block; the mean of all where they differ. What joins gradients to the sums is of a mean block too."""
    c, tokens, h = run.bytes_of[1], run.tokens, shape.hidden
    forward_s, input_s, weight_s = (_products_s(shape, tokens, speed, way) for way in ("forward", "input", "weight"))
    flops = shape.attention_flops_a_token(run.sequence_length) / 3 / shape.layers * tokens
    attention = [speed.attention_s(flops, shape.head_dim, run.sequence_length, backward=back) for back in (False, True)]
    pass_s = c * tokens * (1.0 if run.compiled else EAGER_PASSES) / speed.memory_bytes_s
    turned = 2 * (shape.heads + shape.kv_heads) * shape.head_dim if shape.family not in POSITIONED else 0
    gates = shape.ffn if shape.gated else 0
    starts, back_starts = STARTS[run.compiled]
    copied = 2 * h if run.strategy == "streamed" and run.streaming.inputs == "host" else 0
    adapted = shape.adapted(run.adapter.targets) if run.adapter.trains else []
    again = 6 * h + turned + 2 * shape.ffn + gates + sum(linear.inputs + 4 * linear.outputs for linear in adapted)
    back = 11 * h + turned + 3 * shape.ffn + 2 * gates + sum(5 * linear.inputs + 2 * linear.outputs for linear in adapted)
    forward = Parts(sum(forward_s), attention[0], (again + 3 * h + copied) * pass_s)
    input_gradient = Parts(sum(input_s), attention[1], back * pass_s)
    return _trained(
        run,
        UnitParts(
            forward=_started(forward, starts, speed),
            recompute=_started(Parts(sum(forward_s[:-1]), attention[0], again * pass_s), starts - 1, speed),
            input_gradient=_started(input_gradient, back_starts, speed),
            weight_gradient=Parts(sum(weight_s)),
            sums=_sums(sum(shape.block_sizes) / shape.layers, run, speed),
        ),
    )


def block_products(shape: ModelShape) -> list[tuple[int, int]]:
    """(inputs, outputs) of a dense block's matrices, the last one last. What differs from it (experts that few tokens go to,
    latent attention) counts by its parameters."""
    h, width, kv_width = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = [(h, width + 2 * kv_width), (width, h)]
    if shape.family not in FUSED_QUERIES:
        attention = [(h, width), (h, kv_width), (h, kv_width), (width, h)]
    return [*attention, *[(h, shape.ffn)] * (2 if shape.gated else 1), (shape.ffn, h)]


def _products_s(shape: ModelShape, tokens: int, speed: Speed, way: str) -> list[float]:
    """Seconds of each matrix of a block: forward, its input's gradient or its own."""
    products = block_products(shape)
    share = (shape.matmul_parameters - shape.vocab * shape.hidden) / shape.layers / sum(a * b for a, b in products)
    sizes = {"forward": (0, 1, 2), "input": (0, 2, 1), "weight": (2, 0, 1)}[way]
    found = []
    for inputs, outputs in products:
        m, k, n = ((tokens, inputs, outputs)[place] for place in sizes)
        found.append(share * speed.product_s(m, k, n))
    return found


def head_time(shape: ModelShape, run: Footprint, speed: Speed) -> UnitParts:
    """Of the final norm, the head and the loss, chunk by chunk."""
    m, c = run.bytes_of
    chunk = min(run.loss_chunk, run.tokens)
    chunks, table = run.tokens / chunk, shape.vocab * shape.hidden
    made = Parts(
        chunks * speed.product_s(chunk, shape.hidden, shape.vocab),
        elementwise_s=(4 * shape.vocab + 4 * shape.hidden) * c * run.tokens / speed.memory_bytes_s,
    )
    summed = chunks * 2 * m * table / speed.memory_bytes_s
    once = (m + (m + c if m > c else 0) + 2 * c) * table / speed.memory_bytes_s  # zeroed, rounded, scaled
    return _trained(
        run,
        UnitParts(
            forward=_started(made, round(chunks) * 3 + 2, speed),
            input_gradient=Parts(
                chunks * speed.product_s(chunk, shape.vocab, shape.hidden),
                elementwise_s=5 * shape.hidden * c * run.tokens / speed.memory_bytes_s,
            ),
            weight_gradient=Parts(chunks * speed.product_s(shape.vocab, chunk, shape.hidden), elementwise_s=summed),
            sums=Parts(elementwise_s=once) + _sums(unit_parameters(shape)[-1], run, speed),
        ),
    )


def embedding_time(shape: ModelShape, run: Footprint, speed: Speed) -> UnitParts:
    """Of the look-up; backward fills a gradient of the whole table."""
    c, parameters = run.bytes_of[1], unit_parameters(shape)[0]
    row_s = 2 * shape.hidden * c * run.tokens / speed.memory_bytes_s
    return _trained(
        run,
        UnitParts(
            forward=_started(Parts(elementwise_s=row_s), 5, speed),
            weight_gradient=_started(Parts(elementwise_s=2 * row_s), 8, speed),
            sums=Parts(elementwise_s=c * parameters / speed.memory_bytes_s) + _sums(parameters, run, speed),
        ),
    )


def compute_time(shape: ModelShape, run: Footprint, speed: Speed) -> Parts:
    """One worker's forward and backward of a step, all its micro-batches, without the optimizer."""
    recompute = run.activations == "recompute"
    block = block_time(shape, run, speed).step(recompute=recompute).times(shape.layers)
    outer = embedding_time(shape, run, speed).step(recompute=False) + head_time(shape, run, speed).step(recompute=False)
    return (block + outer).times(run.rounds)


def optimizer_s(parameters: float, run: Footprint, speed: Speed) -> float:
    """AdamW over `parameters` that this device updates, gradient norm included: master and both moments read and written, the
    gradient read twice, the working copy written where there is one."""
    m, c = run.bytes_of
    return parameters * (2 * m + 4 * m + 2 * m + (c if c < m else 0)) / speed.memory_bytes_s


def unit_times(shape: ModelShape, run: Footprint, speed: Speed) -> tuple[UnitTime, ...]:
    """By unit of a streamed step, for schedule.simulate."""
    first, block, head = (time(shape, run, speed) for time in (embedding_time, block_time, head_time))
    blocks = [_trained(run, replace(block, sums=_sums(size, run, speed))) for size in shape.block_sizes]
    return tuple(_unit_time(parts, run.tokens) for parts in (first, *blocks, head))


def stream_rates(shape: ModelShape, run: Footprint, speed: Speed) -> Rates:
    """For schedule.simulate and schedule.solve: this device at this model. Raises InputError without a link."""
    if speed.link is None:
        raise InputError(
            f"the link of this card is not known ({speed.source}): measure it with `mule probe --out machine.json` and plan "
            "with --on machine.json"
        )
    return Rates(
        compute_flops=max(rate for _, rate in speed.products),
        up_bytes_s=speed.link.up,
        down_bytes_s=speed.link.down,
        both_bytes_s=speed.link.both,
        memory_bytes_s=speed.memory_bytes_s,
        op_overhead_s=speed.link.copy_s,
        units=unit_times(shape, run, speed),
    )


def _trained(run: Footprint, parts: UnitParts) -> UnitParts:
    """Beside an adapter the model's own gradients are not computed."""
    return replace(parts, weight_gradient=Parts(), sums=Parts()) if run.adapter.trains else parts


def _sums(parameters: float, run: Footprint, speed: Speed) -> Parts:
    m, c = run.bytes_of
    return Parts(elementwise_s=parameters * (c + m * (2 - 1 / run.rounds)) / speed.memory_bytes_s)


def _started(work: Parts, operations: int, speed: Speed) -> Parts:
    """`work` with what starting its operations takes beyond it."""
    return work + Parts(launch_s=max(0.0, operations * speed.kernel_s - work.total_s))


def _unit_time(parts: UnitParts, tokens: int) -> UnitTime:
    def span(part: Parts) -> Span:
        return Span(token_s=part.total_s / tokens)

    weights = Span(fixed_s=parts.sums.total_s, token_s=parts.weight_gradient.total_s / tokens)
    return UnitTime(
        forward=span(parts.forward),
        recompute=span(parts.recompute),
        input_gradient=span(parts.input_gradient),
        weight_gradient=weights,
    )
