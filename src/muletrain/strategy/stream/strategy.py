"""streamed: parameters, gradients and optimizer state live in host memory; a step goes through the model unit by unit.

All micro-batches of a wave go through one unit before the next, so a unit's weights cross the link twice a wave and only
one unit's activations are alive. What is done in which order, and what waits for what, is a Schedule (schedule.build); this
class builds the pieces, keeps what lasts from step to step, and hands each op to the one who does it.

With a global norm clip a unit cannot be updated when its gradient is there, since the norm is not known yet. It is updated
when it is next fetched, in the next step: synchronous semantics, nothing stale, and the update rides along with a transfer
that happens anyway. `flush` applies what is pending before weights or state are read. Without clip or loss scale a unit is
updated in backward: a loss that is not finite then stops all updates, a gradient that is not finite those from its unit on.

Several workers of a box share the host's memory (shared.py, exchange.py): each goes through the units with its own
micro-batches, and all decide together. They meet once more where one reads what others may still be writing: after a flush,
and after loading.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from muletrain.data.batch import MicroBatch
from muletrain.metrics.memory import peak_memory_bytes
from muletrain.models.causal import canonical_name
from muletrain.schedule.build import build, waves_of
from muletrain.schedule.ops import Op, Schedule, StepShape
from muletrain.spec.plan import StreamingPlan
from muletrain.strategy.contract import Narrow, StepContext, StepResult
from muletrain.strategy.forward import on_device
from muletrain.strategy.materials import Materials
from muletrain.strategy.parts import StepParts
from muletrain.strategy.randomness import KeyedRandom
from muletrain.strategy.stream.compute import Compute, Work
from muletrain.strategy.stream.device import Pending
from muletrain.strategy.stream.executor import Executor, InOrder, Streams
from muletrain.strategy.stream.kept import as_saved
from muletrain.strategy.stream.setup import Blocks, Built, assemble
from muletrain.strategy.update import Decision

Mode = Literal["train", "evaluate", "flush"]


class StreamedStrategy:
    """See strategy.contract.Strategy."""

    def __init__(
        self,
        materials: Materials,
        blocks: Blocks,
        streaming: StreamingPlan,
        seed: int,
        wave: int,
    ) -> None:
        """`blocks`: how slots' blocks run; `wave`: micro-batches in a full step's largest wave."""
        m = materials
        self._model, self._torch_device, self._random = m.model, m.device, m.random
        self._updater, self._meter = m.updater, m.meter
        self._names = [canonical_name(name) for name, parameter in m.model.named_parameters() if parameter.requires_grad]
        self._built: Built = assemble(materials, blocks, streaming, seed, self._run_layer)
        self._device, self._exchange, self._wave = self._built.device, self._built.exchange, wave
        self._compute = Compute(m.model, self._device, self._built.stage)
        self.executor: Executor = Streams(m.device) if m.device.type == "cuda" else InOrder()
        self._schedules: dict[StepShape, Schedule] = {}
        self._norms = torch.zeros(len(self._names), dtype=torch.float64, device=m.device)
        self._work: Work | None = None
        self._decision: Decision | None = None
        self._context: StepContext | None = None

    # --- a step -----------------------------------------------------------------------------------------------------

    def step(self, micro_batches: Sequence[MicroBatch], context: StepContext) -> StepResult:
        """One update over this worker's micro-batches, applied when units are next fetched."""
        parts = StepParts(self._torch_device, self._meter)
        self._context = context
        self._apply_in_backward(sum(batch.tokens for batch in micro_batches), context)
        self._run(micro_batches, "train", context.window)
        assert self._decision is not None
        decision, self._decision = self._decision, None
        if self._device.adapter is not None:  # on the device already, and the norm is known
            self._device.adapter.update(decision.scalars, context.update)
        parts.end("compute")
        result = self._updater.result(decision, parts.seconds)
        if not result.skipped and self._device.plan.update == "next_fetch" and self._device.adapter is None:
            self._device.pending = Pending(decision.scalars, context.update)
        return result

    def _apply_in_backward(self, tokens: int, context: StepContext) -> None:
        """This step's own updates, if they are made in backward; none without a trained token."""
        if self._device.plan.update == "in_backward":
            scalars = self._updater.unclipped(tokens, context, self._torch_device)
            finite = scalars.apply.repeat(len(self._device.units))
            self._device.pending = Pending(scalars, context.update, finite)

    def _run(self, micro_batches: Sequence[MicroBatch], mode: Mode, window: int = 0) -> Work:
        device = self._torch_device
        batches = [on_device(batch, device) for batch in micro_batches]
        zero = torch.zeros((), dtype=torch.float64, device=device)
        random = self._random if mode == "train" else KeyedRandom(0, enabled=False)
        self._work = work = Work(batches, window, mode == "train", random, self._updater.scaler.factor, zero)
        shape = StepShape(
            micro_batches=tuple(batch.input_ids.numel() for batch in batches),
            sequence_length=batches[0].input_ids.shape[1] if batches else 1,
            pending=self._device.pending is not None and self._device.plan.update == "next_fetch",
            mode=mode,
        )
        if shape not in self._schedules:
            self._schedules[shape] = build(self._device.plan, shape)
        if self._device.plan.inputs == "host" and batches:
            self._built.ensure_inputs(max(shape.micro_batches), max(map(len, waves_of(self._device.plan, shape))))
        if mode == "train" and "offload" in self._device.plan.activations:
            self._ensure_offload(work, max(map(len, waves_of(self._device.plan, shape))))
        self._execute(self._schedules[shape])
        self._device.pending, self._work = None, None
        return work

    def _ensure_offload(self, work: Work, positions: int) -> None:
        """Room for what blocks save and send: as much as one of each kind saves of the largest micro-batch, which is tried."""
        largest = max(work.batches, key=lambda batch: batch.input_ids.numel())
        tokens = largest.input_ids.numel()
        if self._built.has_offload_room(tokens, positions):
            return
        saved: dict[int, int] = {}  # by kind of block
        for unit, policy in enumerate(self._device.plan.activations):
            kind = self._device.plan.units[unit].kind
            if policy == "offload" and kind not in saved:
                self._device.slots[unit].flat.copy_(self._device.units[unit].working)
                saved[kind] = self._compute.saved_bytes(unit, largest, work)
        self._built.make_offload_room(tokens, positions, saved)

    def _execute(self, schedule: Schedule) -> None:
        if self._exchange is None or schedule.step.mode == "evaluate":  # nobody waits for anybody in an evaluation
            self.executor.run(schedule, self._do)
            return
        self._exchange.begin()
        try:
            self.executor.run(schedule, self._do)
        except BaseException:
            self._exchange.team.stop()  # nobody may wait for this worker
            raise

    def _do(self, op: Op) -> None:
        """One op, where the executor puts it."""
        match op.kind:
            case "forward":
                self._compute.forward(op, self._now)
            case "epilogue":
                self._compute.epilogue(op, self._now)
            case "backward":
                self._compute.backward(op, self._now)
            case "norm":
                self._norm(op)
            case "decide":
                self._decide()
            case "store_part" | "fetch_part" | "sum" | "store_sum" | "signal" | "wait":
                getattr(self._exchange, op.kind)(op)
            case _:
                getattr(self._device, op.kind)(op)

    @property
    def _now(self) -> Work:
        assert self._work is not None
        return self._work

    @torch.no_grad()
    def _norm(self, op: Op) -> None:
        grads = self._device.gradient_views(op)
        places = self._built.norm_places[op.unit]
        if self._torch_device.type == "cuda":
            self._norms[places] = torch.stack(torch._foreach_norm(grads, 2)).double()
        else:
            for place, grad in zip(places.tolist(), grads, strict=True):
                self._norms[place] = torch.linalg.vector_norm(grad, dtype=torch.float64)
        pending = self._device.pending
        if pending is not None and pending.finite is not None:  # of this unit and, with it, of all that backward comes to later
            good = torch.isfinite(self._norms[places]).all() & torch.isfinite(self._now.loss_sum)
            pending.finite[: op.unit + 1] &= good

    def _decide(self) -> None:
        work = self._now
        tokens = sum(batch.tokens for batch in work.batches)
        assert self._context is not None
        if self._device.adapter is not None:
            squares = self._device.adapter.square_norm()
        elif self._exchange:
            squares = self._exchange.norms.square().sum()
            self._meet()
        else:
            squares = self._norms.square().sum()
        self._decision = self._updater.decide(work.loss_sum, tokens, squares, self._context)

    def _meet(self) -> None:
        """Before workers exchange a number: what this one has waited for was really there."""
        assert self._exchange is not None
        if self._torch_device.type == "cuda":
            torch.cuda.current_stream(self._torch_device).synchronize()
        self._exchange.team.require_all()

    def _run_layer(self, layer: int, hidden: Tensor, call: Any) -> Any:
        """The first real call of a family's layer: what shape of output it has. Its unit is fetched out of turn."""
        slot = self._device.slots[layer + 1]
        assert slot.module is not None
        slot.flat.copy_(self._device.units[layer + 1].working)
        with torch.no_grad():  # the class's own forward: there is nothing to compile for one call
            return type(slot.module).forward(slot.module, hidden, *call.args, **call.kwargs)

    # --- beside steps -----------------------------------------------------------------------------------------------

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, int]:
        """(loss sum, tokens) over all workers. Goes by groups of a training wave, which is what there is room for."""
        self.flush()
        self._model.eval()
        loss, tokens = 0.0, 0
        for first in range(0, len(micro_batches), self._wave):
            group = micro_batches[first : first + self._wave]
            loss += float(self._run(group, "evaluate").loss_sum)
            tokens += sum(batch.tokens for batch in group)
        self._model.train()
        sums = self._updater.total(torch.tensor([loss, float(tokens)], dtype=torch.float64))
        return float(sums[0]), int(sums[1])

    def warm_up(self, micro_batch: MicroBatch) -> None:
        """Forward and backward of one batch, forgotten."""
        self._context = StepContext(0, 0, 0.0)
        self._apply_in_backward(0, self._context)
        self._run([micro_batch], "train")
        self._decision = None

    def flush(self) -> None:
        """Applies the pending update to every unit."""
        pending = self._device.pending is not None
        if pending:
            self._run([], "flush")
        if self._torch_device.type == "cuda":
            torch.cuda.synchronize(self._torch_device)
        if pending and self._exchange:
            self._exchange.team.barrier()

    def close(self) -> None:
        """Gives pinned host memory back to the driver; nothing may be asked of this strategy afterwards."""
        if self._exchange:
            self._exchange.team.close()
        for arena in self._built.arenas:
            arena.close()

    # --- state ------------------------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, dict[str, Tensor | Narrow]]:
        """Live views of the host arrays; what is kept narrower is made on demand and never whole."""
        self.flush()
        saved = {name: as_saved(self._built.unit_of[name], name) for name in self._names}
        return {kind: {name: saved[name][kind] for name in self._names} for kind in ("parameter", "exp_avg", "exp_avg_sq")}

    def state_scalars(self) -> dict[str, Any]:
        """The loss scale."""
        return self._updater.scaler.state()

    def loaded(self, scalars: dict[str, Any]) -> None:
        """Takes the scalars back and rounds the masters into the working weights."""
        self._updater.scaler.load(scalars)
        for unit in set(self._built.unit_of.values()):
            unit.refresh()
        if self._exchange:
            self._exchange.team.barrier()

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Whole master weights, one at a time."""
        self.flush()
        for name in self._names:
            master = as_saved(self._built.unit_of[name], name)["parameter"]
            yield name, master.whole() if isinstance(master, Narrow) else master.cpu()

    def peak_memory_bytes(self) -> int:
        """Peak of this worker."""
        return peak_memory_bytes(self._torch_device.type)
