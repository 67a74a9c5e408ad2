"""A unit's parameters as one flat array, and AdamW on pieces of it: what the streamed strategy updates.

Decayed parameters come first, then the others, each from a multiple of 256, so a unit has at most two regions of equal decay
and a piece is one kernel however many parameters it covers. Pieces and workers' slices start at multiples of 256 too, and
rounding is keyed by the element's place in the unit: any cut gives the same bits. The arithmetic is optim.adamw's own function,
so with fp32 moments the result is the resident strategy's. Padding holds zeros and stays zero. Rejected: parameters in model
order with a kernel each (a block has several tiny ones), and decay as an array (bytes on the link for one bit).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from muletrain.optim.adamw import CPU_CHUNK, UpdateScalars, decayed, new_values
from muletrain.optim.master import SplitMaster, join_bits, split_bits
from muletrain.optim.moments import BLOCK, Moment, MomentFormat, MomentKind, blocked, moment_formats
from muletrain.optim.rounding import halves, keyed_bits
from muletrain.spec.recipe import OptimizerSection


@dataclass(frozen=True)
class FlatSegment:
    """A parameter's place in its unit's flat arrays."""

    name: str
    shape: torch.Size
    start: int
    decay: bool

    def of(self, flat: Tensor) -> Tensor:
        """This parameter in a flat array of its unit."""
        return flat[self.start : self.start + self.shape.numel()].view(self.shape)


@dataclass(frozen=True)
class Region:
    """Elements start to stop of a unit, all decayed or all not. Multiples of 256."""

    start: int
    stop: int
    decay: bool

    @property
    def size(self) -> int:
        """Elements, padding included."""
        return self.stop - self.start


@dataclass(frozen=True)
class Piece:
    """Neighbouring regions that are staged together: elements `start` to `stop` of a unit."""

    regions: tuple[Region, ...]

    @property
    def start(self) -> int:
        """Of the first region."""
        return self.regions[0].start

    @property
    def stop(self) -> int:
        """Of the last region."""
        return self.regions[-1].stop

    @property
    def size(self) -> int:
        """Elements, padding included."""
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """Where each parameter of a unit lies; `size` elements in all, a multiple of 256."""

    segments: tuple[FlatSegment, ...]
    """Decayed ones first, otherwise in the order given."""
    regions: tuple[Region, ...]
    size: int

    @classmethod
    def of(cls, named: Iterable[tuple[str, Tensor]]) -> FlatLayout:
        """Lays out parameters (on any device, meta too); which are decayed is optim.adamw's rule."""
        parameters = list(named)
        segments: list[FlatSegment] = []
        regions: list[Region] = []
        end = 0
        for decay in (True, False):
            begin = end
            for name, parameter in parameters:
                if decayed(parameter) is decay:
                    segments.append(FlatSegment(name, parameter.shape, end, decay))
                    end += _up(parameter.numel())
            if end > begin:
                regions.append(Region(begin, end, decay))
        return cls(tuple(segments), tuple(regions), end)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """{name: its view} of a flat array of `size` elements."""
        return {segment.name: segment.of(flat) for segment in self.segments}

    def pieces(self, max_elements: int, start: int = 0, stop: int | None = None) -> Iterator[Piece]:
        """Cuts elements start to stop (a worker's slice; multiples of 256) into near-equal pieces of at most `max_elements`.
        The few that are not decayed are no pieces of their own: each would take a staging buffer and a turn on the link.

        Raises ValueError where a bound is no multiple of 256 or `max_elements` is below 256.
        """
        stop = self.size if stop is None else stop
        if start % BLOCK or stop % BLOCK or max_elements < BLOCK:
            raise ValueError(f"slice {start}:{stop} in pieces of {max_elements}: blocks have {BLOCK} elements")
        blocks, most = max(0, stop - start) // BLOCK, max_elements // BLOCK
        count = -(-blocks // most)
        for a, b in pairwise(start + blocks * i // max(1, count) * BLOCK for i in range(count + 1)):
            inside = (Region(max(a, r.start), min(b, r.stop), r.decay) for r in self.regions)
            yield Piece(tuple(region for region in inside if region.size > 0))


def _up(elements: int) -> int:
    return -(-elements // BLOCK) * BLOCK


@dataclass(frozen=True)
class StateFormat:
    """In what form a unit's training state is kept."""

    first: MomentFormat
    second: MomentFormat
    split: bool
    """The master is a (bf16, int16) pair; else one array of `first.full`."""

    @classmethod
    def of(cls, moments: MomentKind, master: torch.dtype, split: bool) -> StateFormat:
        """Of `train.optimizer.state` and the precision policy; `split` needs fp32 masters."""
        if split and master != torch.float32:
            raise ValueError(f"only fp32 masters are split, not {master}")
        return cls(*moment_formats(moments, master), split)

    def allocate(self, n: int, device: torch.device | str = "cpu") -> FlatState:
        """Zero state of n elements, n a multiple of 256."""
        first, second = self.first.allocate(n, device), self.second.allocate(n, device)
        if not self.split:
            return FlatState(self, torch.zeros(n, dtype=self.first.full, device=device), first, second)
        hi = torch.zeros(n, dtype=torch.bfloat16, device=device)
        return FlatState(self, SplitMaster(hi, torch.zeros(n, dtype=torch.int16, device=device)), first, second)


@dataclass(frozen=True)
class FlatState:
    """The training state of a flat array of n elements, or of a part of one. All tensors are contiguous and on one device."""

    format: StateFormat
    master: Tensor | SplitMaster
    exp_avg: Moment
    exp_avg_sq: Moment

    def part(self, start: int, stop: int) -> FlatState:
        """A view of elements start to stop, both multiples of 256."""
        master = self.master
        cut = SplitMaster(*(t[start:stop] for t in master)) if isinstance(master, SplitMaster) else master[start:stop]
        return FlatState(self.format, cut, self.exp_avg.part(start, stop), self.exp_avg_sq.part(start, stop))

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that is moved: master, first moment, second moment."""
        master = self.master if isinstance(self.master, SplitMaster) else (self.master,)
        return (*master, *self.exp_avg.tensors(), *self.exp_avg_sq.tensors())


def state_bytes(format: StateFormat, gradient: torch.dtype) -> tuple[float, float]:
    """(up, down) bytes a parameter that an update moves to the card and back: master, moments; the gradient only up."""
    master = 4 if format.split else format.first.full.itemsize
    state = master + format.first.bytes_a_parameter + format.second.bytes_a_parameter
    return state + gradient.itemsize, state


@torch.no_grad()
def update_piece(
    state: FlatState,
    grad: Tensor,
    scalars: UpdateScalars,
    section: OptimizerSection,
    *,
    decay: bool,
    key: int,
    start: int,
    working_out: Tensor | None = None,
) -> None:
    """AdamW on one piece, in place.

    `grad` [n] is the summed, still scaled gradient, of any float dtype. `key` (63 bits) names (seed, update, unit) and `start`
    is the piece's first element in its unit: together they key the rounding of moments. `working_out` [n], of the compute
    dtype, gets the new working copy (bf16 of a split master: its hi); leave it out where the model computes with the state's
    own hi or master. With `scalars.apply` False no bit of the state changes, and `working_out` gets a copy of the old master.
    Raises ValueError if n or `start` is no multiple of 256.
    """
    n, device = grad.numel(), grad.device
    if n % BLOCK or start % BLOCK:
        raise ValueError(f"piece of {n} elements from {start}: blocks have {BLOCK} elements")
    if n > CPU_CHUNK and not grad.is_cuda:
        for first in range(0, n, CPU_CHUNK):
            last = min(n, first + CPU_CHUNK)
            working = None if working_out is None else working_out[first:last]
            part, summed, place_in_unit = state.part(first, last), grad[first:last], start + first
            update_piece(part, summed, scalars, section, decay=decay, key=key, start=place_in_unit, working_out=working)
        return
    # Filled on the device: a copy of two numbers would queue behind the parameters on the link.
    place = (torch.full((), key, device=device), torch.full((), start, device=device))
    numbers = (scalars.gradient_scale, scalars.step_size, scalars.inverse_bias2, scalars.keep if decay else scalars.one)
    betas = (section.beta1, section.beta2, section.epsilon)
    arrays = _blocked_arrays(state, grad, working_out)
    if grad.is_cuda:
        _compiled(state.format)(*_for_compiler(arrays), scalars.apply, place, numbers, betas)
    else:
        _kernel(state.format)(*arrays, scalars.apply, place, numbers, betas)


def _blocked_arrays(state: FlatState, grad: Tensor, working: Tensor | None) -> tuple[Any, ...]:
    """The first five arguments of the kernel: views [n / 256, 256], bf16 that is handled as a bit pattern as int16."""
    master = state.master
    if isinstance(master, SplitMaster):
        pair: tuple[Tensor, ...] = (master.hi.view(torch.int16), master.low)
        if working is not None and working.dtype == torch.bfloat16:
            working = working.view(torch.int16)
    else:
        pair = (master,)
    weights = tuple(t.view(-1, BLOCK) for t in pair)
    copy = None if working is None else working.view(-1, BLOCK)
    return weights, blocked(state.exp_avg), blocked(state.exp_avg_sq), grad.view(-1, BLOCK), copy


def _for_compiler(arrays: Any) -> Any:
    """The same memory, told to the compiler so that it compiles once for all lengths and offsets.

    The number of blocks is marked as changing. Each tensor gets a storage of its own (through DLPack): the compiler refuses
    arrays of several types that it finds in one storage, and arenas are such storages.
    """
    if isinstance(arrays, tuple):
        return tuple(_for_compiler(item) for item in arrays)
    if arrays is None:
        return None
    alias = torch.utils.dlpack.from_dlpack(arrays.detach())
    torch._dynamo.maybe_mark_dynamic(alias, 0)
    return alias


def _kernel(format: StateFormat) -> Callable[..., None]:
    """The update of blocked arrays, written so that it compiles into one kernel that reads and writes each of them once."""
    first, second = format.first, format.second
    rounds = first.kind != "fp32" or second.kind != "fp32"

    def update(
        pair: tuple[Tensor, ...],
        exp_avg: tuple[Tensor, ...],
        exp_avg_sq: tuple[Tensor, ...],
        grad: Tensor,
        working: Tensor | None,
        apply: Tensor,
        place: tuple[Tensor, Tensor],
        numbers: tuple[Tensor, Tensor, Tensor, Tensor],
        betas: tuple[float, float, float],
    ) -> None:
        master = join_bits(*pair) if format.split else pair[0]
        values = new_values(master, grad, first.decode(exp_avg), second.decode(exp_avg_sq), *numbers, *betas)
        noise = (grad, grad)
        if rounds:
            index = torch.arange(grad.numel(), device=grad.device).view(grad.shape) + place[1]
            noise = halves(keyed_bits(place[0], index))
        new = (*(split_bits(values[0]) if format.split else values[:1]), *first.encode(values[1], noise[0]))
        new += second.encode(values[2], noise[1])
        old = (*pair, *exp_avg, *exp_avg_sq)
        chosen = [torch.where(apply, fresh, kept) for fresh, kept in zip(new, old, strict=True)]
        for target, value in zip(old, chosen, strict=True):
            target.copy_(value)
        if working is not None:
            whole = working.dtype == torch.int16 or not format.split
            working.copy_(chosen[0] if whole else join_bits(chosen[0], chosen[1]))

    return update


@cache
def _compiled(format: StateFormat) -> Callable[..., None]:
    return torch.compile(_kernel(format))
