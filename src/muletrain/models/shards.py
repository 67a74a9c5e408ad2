"""Writes safetensors files a tensor at a time, in any order: nothing but the tensor at hand is in memory.

The format is a length, a JSON header that says where each tensor's bytes lie, and the bytes, so a file of the right size can be
made from names and shapes alone and filled in afterwards. Rejected: safetensors' own `save_file`, which wants all tensors of a
file at once, 5 GiB beside a model that fills the host.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

Shaped = tuple[str, tuple[int, ...]]
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""By the names that the files use."""
_PIECE = 2**20
"""Elements that are converted and written at a time."""


@dataclass(frozen=True)
class _Place:
    path: Path
    shape: tuple[int, ...]
    offset: int
    """Of the first byte, from the start of the file."""


class Shards:
    """Files for the tensors of a model, cut by size; `put` fills them. A tensor larger than a file's limit has its own."""

    def __init__(self, folder: Path, tensors: Iterable[Shaped], dtype: torch.dtype, most_bytes: int) -> None:
        """Lays out `shard-….part` files in `folder`, which exists, in the order given."""
        self._dtype, self.itemsize = dtype, dtype.itemsize
        self._places: dict[str, _Place] = {}
        self._missing: set[str] = set()
        self.files: list[tuple[Path, list[str]]] = []
        """(path, names of its tensors)."""
        for number, shard in enumerate(_cut(tensors, dtype.itemsize, most_bytes), start=1):
            path = folder / f"shard-{number:05d}.part"  # a name that nothing reads: it is full of holes until the end
            self._begin(path, shard)
            self.files.append((path, [name for name, _ in shard]))

    def _begin(self, path: Path, shard: list[Shaped]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        ends = []
        end = 0
        for name, shape in shard:
            begin, end = end, end + _elements(shape) * self._dtype.itemsize
            header[name] = {"dtype": DTYPES[self._dtype], "shape": list(shape), "data_offsets": [begin, end]}
            ends.append(end)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(start + end)
        for (name, shape), begin in zip(shard, [0, *ends], strict=False):
            self._places[name] = _Place(path, shape, start + begin)
            self._missing.add(name)

    def put(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor, of any device and float type. Raises ValueError for one that was not announced with this shape."""
        place = self._places.get(name)
        if place is None or place.shape != tuple(tensor.shape):
            raise ValueError(f"{name} {list(tensor.shape)} is not a tensor of this model")
        with place.path.open("r+b") as file:
            file.seek(place.offset)
            for piece in tensor.detach().reshape(-1).split(_PIECE):
                file.write(piece.to("cpu", self._dtype).contiguous().view(torch.uint8).numpy().data)
        self._missing.discard(name)

    @property
    def missing(self) -> list[str]:
        """Announced and not put yet."""
        return sorted(self._missing)


def _cut(tensors: Iterable[Shaped], itemsize: int, most_bytes: int) -> Iterable[list[Shaped]]:
    shard: list[Shaped] = []
    held = 0
    for name, shape in tensors:
        size = _elements(shape) * itemsize
        if shard and held + size > most_bytes:
            yield shard
            shard, held = [], 0
        shard.append((name, shape))
        held += size
    yield shard


def _elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
