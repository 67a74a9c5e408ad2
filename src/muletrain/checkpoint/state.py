"""The training state through DCP, a few MiB at a time: neither a save nor a load holds a second copy of it.

Tensors are written in chunks of rows, each copied or made (strategy.contract.Narrow) when its turn comes. What is on disk is
what DCP always writes, so any number of workers reads it into any cut. Rejected: one item a tensor, which is DCP's default (an
embedding is 2 GiB, and DCP's writer keeps what it was handed until the file is complete: a copy of all the state); a file a
tensor, which frees them (thousands of files).
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from muletrain.strategy.contract import Narrow, Strategy

_CHUNK_BYTES = 8 * 2**20
"""What a save holds of the state; each chunk costs a millisecond or so."""
_LOADS = 64
"""In how many parts narrow tensors are loaded: each is held in full until it is put back."""

State = Mapping[str, Tensor | Narrow]


def flat_state(strategy: Strategy) -> dict[str, Tensor | Narrow]:
    """The training state under one flat name each: "exp_avg/model.layers.0.…"."""
    return {f"{kind}/{name}": tensor for kind, named in strategy.state_tensors().items() for name, tensor in named.items()}


def write_state(folder: Path, state: State) -> None:
    """Writes this worker's share of `state`. Collective; raises what any worker's write raised, on all."""
    # Nothing is copied ahead: DCP's writer then asks for a chunk when the one before is written, which the planner relies on.
    writer = dcp.FileSystemWriter(folder, sync_files=True, per_thread_copy_ahead=0)
    places = {name: _place(value) if isinstance(value, Narrow) else value for name, value in state.items()}
    # A thread has a heap of its own. In the writer's, DCP's small lasting objects would settle between the intermediate results
    # of one chunk, and the next chunk's would need new room: a hundredth and more of the state in all.
    try:
        with torch.no_grad(), _quietly(), ThreadPoolExecutor(1) as maker:
            dcp.save(places, storage_writer=writer, planner=_Chunks(state, maker), no_dist=not dist.is_initialized())
    except dcp.api.CheckpointException as error:  # a BaseException, raised on every worker; its first failure is the cause
        raise next(iter(error.failures.values()))[0] from None


def read_state(reader: dcp.FileSystemReader, state: State) -> None:
    """Fills all tensors of `state` in place. Collective."""
    live = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    with torch.no_grad(), _quietly():
        if live:
            _load(reader, live)
        for part in _parts({name: value for name, value in state.items() if isinstance(value, Narrow)}):
            whole = {name: torch.empty(narrow.shape, dtype=narrow.dtype) for name, narrow in part.items()}
            _load(reader, whole)
            for name, narrow in part.items():
                narrow.write(whole.pop(name))


def _load(reader: dcp.FileSystemReader, tensors: dict[str, Tensor]) -> None:
    dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())


def _parts(state: dict[str, Narrow]) -> Iterator[dict[str, Narrow]]:
    """Groups of near-equal bytes, in order; a tensor that is larger than a group is one of its own."""
    most = sum(map(_size_bytes, state.values())) / _LOADS
    part: dict[str, Narrow] = {}
    held = 0
    for name, narrow in state.items():
        if part and held + _size_bytes(narrow) > most:
            yield part
            part, held = {}, 0
        part[name] = narrow
        held += _size_bytes(narrow)
    if part:
        yield part


def _size_bytes(narrow: Narrow) -> int:
    return narrow.shape.numel() * narrow.dtype.itemsize


def _place(narrow: Narrow) -> Tensor:
    return torch.empty(narrow.shape, dtype=narrow.dtype, device="meta")


@contextmanager
def _quietly() -> Iterator[None]:
    """DCP warns when there is no process group, which is how one worker runs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _Chunks(dcp.DefaultSavePlanner):
    """Cuts what this worker writes into chunks of rows, and makes each when the writer asks for it."""

    def __init__(self, state: State, maker: Executor) -> None:
        super().__init__()
        self._state = state
        self._rows: dict[MetadataIndex, tuple[int, int]] = {}
        """By chunk: the rows of this worker's tensor (its shard of a DTensor)."""
        self._buffer = mmap.mmap(-1, _CHUNK_BYTES)
        self._maker = maker

    def create_local_plan(self) -> SavePlan:
        """DCP's own plan, its items cut up."""
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[part for item in plan.items for part in self._cut(item)])
        return self.plan

    def _cut(self, item: WriteItem) -> Iterator[WriteItem]:
        data = item.tensor_data
        assert data is not None and data.chunk is not None
        offsets, sizes = data.chunk.offsets, data.chunk.sizes
        rows = sizes[0] if sizes else 1
        row_bytes = sizes[1:].numel() * data.properties.dtype.itemsize if sizes else 0
        step = max(1, _CHUNK_BYTES // max(1, row_bytes))
        if rows <= step:
            self._rows[item.index] = (0, rows)
            yield item
            return
        for first in range(0, rows, step):
            last = min(first + step, rows)
            at = torch.Size((offsets[0] + first, *offsets[1:]))
            index = MetadataIndex(item.index.fqn, at)
            self._rows[index] = (first, last)
            chunk = ChunkStorageMetadata(at, torch.Size((last - first, *sizes[1:])))
            yield replace(item, index=index, type=WriteItemType.SHARD, tensor_data=replace(data, chunk=chunk))

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """A chunk, in memory that the next one will lie in: the writer, which keeps a reference, is done with it by then."""
        assert write_item.tensor_data is not None and write_item.tensor_data.chunk is not None
        first, last = self._rows[write_item.index]
        value = self._state[write_item.index.fqn]
        out = self._room(write_item.tensor_data.chunk.sizes, value.dtype)
        if isinstance(value, Narrow):
            self._maker.submit(value.read, first, out).result()
        else:
            mine = (value.to_local() if isinstance(value, DTensor) else value).detach()
            out.copy_(mine[first:last] if mine.dim() else mine)
        return out

    def _room(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor over the one buffer, with a storage of just its size: the writer would copy another, and keep the copy."""
        size = shape.numel() * dtype.itemsize
        if size > len(self._buffer):  # a row larger than a chunk
            self._buffer = mmap.mmap(-1, size)
        if not size:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._buffer, dtype=dtype, count=shape.numel()).view(shape)
