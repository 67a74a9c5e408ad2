"""What blocks save for backward, where their policy is not to compute it again: left on the card, or sent to the host and back.

Autograd itself says what is saved, through its saved-tensor hooks, for eager and compiled blocks alike; so nothing of a family
is known here. A block's weights, its input and its arguments are in places of their own and stay out of it, and so does what
lies in memory with holes. What is sent leaves the card when its copy is through, and comes back into one of two buffers in the
order of backward. Rejected: `torch.autograd.graph.save_on_cpu`, which pins memory anew for each tensor and waits for each copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

_ALIGNMENT = 512


@dataclass
class Saved:
    """What one call of a block saved and may be sent, in autograd's order."""

    tensors: list[Tensor] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """By tensor: its first byte on the host; -1: it stays on the card."""


@dataclass(frozen=True)
class _Handle:
    saved: Saved
    number: int


@contextmanager
def gathering(saved: Saved, others: Iterable[Any]) -> Iterator[None]:
    """Autograd leaves in `saved` what calls inside save, but for tensors that share memory with `others`."""
    known = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(list(others)) if isinstance(leaf, Tensor)}

    def pack(tensor: Tensor) -> Tensor | _Handle:
        if tensor.untyped_storage().data_ptr() in known or not _dense(tensor) or not tensor.numel():
            return tensor
        saved.tensors.append(tensor)
        saved.places.append(-1)
        return _Handle(saved, len(saved.tensors) - 1)

    def unpack(packed: Tensor | _Handle) -> Tensor:
        return packed.saved.tensors[packed.number] if isinstance(packed, _Handle) else packed

    with saved_tensors_hooks(pack, unpack):
        yield


def bytes_of(saved: Saved) -> int:
    """Host memory for all of it."""
    return sum(_padded(tensor.nbytes) for tensor in saved.tensors)


class Offload:
    """The host's room and the card's buffers for what is sent."""

    def __init__(self, buffers: int, device: torch.device) -> None:
        self._buffers, self._device = buffers, device
        self._ring: list[Tensor] = []
        self._host: dict[tuple[int, int], Tensor] = {}
        self._calls: dict[tuple[int, int], Saved] = {}

    def place(self, sizes: dict[int, int], positions: int, take: Callable[[int, torch.dtype], Tensor]) -> None:
        """Makes room for `sizes` {unit: bytes a micro-batch} at each position of a wave."""
        self._ring = [torch.empty(max(sizes.values()), dtype=torch.uint8, device=self._device) for _ in range(self._buffers)]
        self._host = {(unit, at): take(size, torch.uint8) for unit, size in sizes.items() for at in range(positions)}

    def called(self, unit: int, micro_batch: int, saved: Saved) -> None:
        """A block's call has saved these."""
        self._calls[unit, micro_batch] = saved

    @torch.no_grad()
    def send(self, unit: int, micro_batch: int, position: int) -> None:
        """To its position of the wave on the host; what there is no room for stays. The card's memory is free again when the
        copies are through."""
        saved, host, start = self._calls[unit, micro_batch], self._host[unit, position], 0
        for number, tensor in enumerate(saved.tensors):
            stop = start + tensor.nbytes
            if stop > host.numel():
                break
            flat = _flat(tensor)
            host[start:stop].view(tensor.dtype).copy_(flat, non_blocking=True)
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
            saved.tensors[number] = torch.empty_like(tensor, device="meta")
            saved.places[number] = start
            start += _padded(tensor.nbytes)

    @torch.no_grad()
    def receive(self, unit: int, micro_batch: int, position: int, buffer: int) -> None:
        """Back into one of the buffers, which must be free."""
        saved, host, ring = self._calls.pop((unit, micro_batch)), self._host[unit, position], self._ring[buffer]
        for number, (shape, start) in enumerate(zip(saved.tensors, saved.places, strict=True)):
            if start < 0:
                continue
            room = ring[start : start + shape.nbytes].view(shape.dtype)
            room.copy_(host[start : start + shape.nbytes].view(shape.dtype), non_blocking=True)
            saved.tensors[number] = room.as_strided(shape.shape, shape.stride(), room.storage_offset())

    def apart(self, gradient: Tensor) -> Tensor:
        """`gradient`, or a copy of it where it lies in one of the buffers: a compiled backward may write its results over what
        it was given to use up, and the buffer's next content would go over the gradient."""
        place = gradient.untyped_storage().data_ptr()
        return gradient.clone() if any(place == room.untyped_storage().data_ptr() for room in self._ring) else gradient


def _dense(tensor: Tensor) -> bool:
    return torch.ops.aten.is_non_overlapping_and_dense(tensor) if tensor.layout == torch.strided else False


def _flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
