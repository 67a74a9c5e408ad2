"""DCP's index of a checkpoint, `state/.metadata`, read without running what it might say.

DCP pickles it and unpickles it as it comes, and a pickle can call any function of any module: a checkpoint from elsewhere could
run code. Here only the classes that an index is made of can be named in it. Tensors are read with `weights_only=True` by DCP
itself, and entries that are no tensors, which it would unpickle freely, are refused where shapes are compared (load).
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from muletrain.spec.errors import InputError

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_ALLOWED = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING")),
    *((_METADATA, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    *((_FILESYSTEM, name) for name in ("_StorageInfo", "_StoragePrefix")),
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),  # where it lies depends on Python's version
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Only what an index is made of, and torch's number formats."""
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of tensors needs and which could run code")


class StateReader(dcp.FileSystemReader):
    """DCP's reader with a safe index, read once however many loads it serves."""

    def __init__(self, folder: Path) -> None:
        """`folder` is a checkpoint's state. Raises InputError, here, where its index is damaged or could run code."""
        super().__init__(folder)
        self._index = _read(folder / ".metadata")

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        """The index."""
        return self._index


def _read(file: Path) -> Metadata:
    try:
        with file.open("rb") as stream:
            index = _Index(stream).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, IndexError) as error:
        raise InputError(
            f"{file}: not read: {error}. Take the checkpoint from where it was written, or another run_dir"
        ) from None
    if not isinstance(index, Metadata):
        raise InputError(f"{file}: not read: it holds {type(index).__name__} and no index. Take the checkpoint from elsewhere")
    return index
