"""A unit's training state as checkpoints hold it: live views where it is kept in full, else made on demand, part by part.

A checkpoint is in master precision under every strategy, and a streamed run's state may take half of that or less: whole copies
would not fit beside it. Rejected: saving the narrow bytes, which other strategies and formats could not read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muletrain.optim.flat import FlatSegment
from muletrain.optim.master import SplitMaster, join_master, split_master
from muletrain.optim.moments import BLOCK, Moment, MomentFormat
from muletrain.strategy.contract import Narrow
from muletrain.strategy.stream.unit import HostUnit

_SCRATCH = 2**16
"""Elements that are converted at a time, so that intermediate results stay in the cache and are no memory to speak of."""
_TO_NEAREST = 0x7FFF
"""As the noise of stochastic rounding: half of what is cut off, so what was decoded is encoded to itself."""


def as_saved(unit: HostUnit, name: str) -> dict[str, Tensor | Narrow]:
    """One parameter's {"parameter"|"exp_avg"|"exp_avg_sq": state}. After a `write`, or a change of the live master,
    HostUnit.refresh must follow."""
    segment, state = unit.segment(name), unit.state
    master = state.master
    return {
        "parameter": _split(segment, master) if isinstance(master, SplitMaster) else segment.of(master),
        "exp_avg": _moment(segment, state.exp_avg, state.format.first),
        "exp_avg_sq": _moment(segment, state.exp_avg_sq, state.format.second),
    }


def _start(segment: FlatSegment, first: int) -> int:
    """Where a row begins in the unit."""
    return segment.start + first * segment.shape[1:].numel()


def _split(segment: FlatSegment, master: SplitMaster) -> Narrow:
    def read(first: int, out: Tensor) -> None:
        start = _start(segment, first)
        hi, low = master.hi[start : start + out.numel()], master.low[start : start + out.numel()]
        for at, target in enumerate(out.view(-1).split(_SCRATCH)):
            part = slice(at * _SCRATCH, at * _SCRATCH + target.numel())
            target.copy_(join_master(hi[part], low[part]))

    def write(whole: Tensor) -> None:
        values = whole.reshape(-1)
        hi, low = segment.of(master.hi).view(-1), segment.of(master.low).view(-1)
        for first in range(0, values.numel(), _SCRATCH):
            part = slice(first, first + _SCRATCH)
            split_master(values[part].to(hi.device), SplitMaster(hi[part], low[part]))

    return Narrow(segment.shape, torch.float32, read, write)


def _moment(segment: FlatSegment, moment: Moment, format: MomentFormat) -> Tensor | Narrow:
    if format.kind == "fp32":
        return segment.of(moment.values)

    def read(first: int, out: Tensor) -> None:
        start = _start(segment, first)
        stop, flat = start + out.numel(), out.view(-1)
        for block in range(start // BLOCK * BLOCK, stop, _SCRATCH):  # a row may begin within a block
            part = moment.part(block, min(block + _SCRATCH, -(-stop // BLOCK) * BLOCK))
            begin, end = max(block, start), min(block + _SCRATCH, stop)
            flat[begin - start : end - start].copy_(format.load(part)[begin - block : end - block])

    def write(whole: Tensor) -> None:
        values, device = whole.reshape(-1), moment.values.device
        for first in range(0, values.numel(), _SCRATCH):
            part = values[first : first + _SCRATCH]
            padded = torch.zeros(-(-part.numel() // BLOCK) * BLOCK, dtype=format.full, device=device)
            padded[: part.numel()] = part
            start = segment.start + first
            nearest = torch.full((padded.numel(),), _TO_NEAREST, dtype=torch.int32, device=device)
            format.store(moment.part(start, start + padded.numel()), padded, nearest)

    return Narrow(segment.shape, format.full, read, write)
