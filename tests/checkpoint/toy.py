"""A strategy that is only state: as much of the seam as a checkpoint needs, sharded by DTensor where there is a group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from muletrain.checkpoint.progress import Progress

SHAPES = {"embed.weight": (7, 3), "block.weight": (5, 2), "norm.weight": (3,)}


class ToyStrategy:
    """Random state. Odd shapes, so that 2, 3 and 4 workers hold uneven shards."""

    def __init__(self, seed: int = 0, sharded: bool = False, shapes: dict[str, tuple[int, ...]] | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if sharded else None
        self.scale = 1.0
        self.refreshed = 0
        self.state: dict[str, dict[str, Tensor]] = {}
        for kind in ("parameter", "exp_avg", "exp_avg_sq"):
            self.state[kind] = {}
            for name, shape in (shapes or SHAPES).items():
                whole = torch.randn(shape, generator=generator)
                self.state[kind][name] = distribute_tensor(whole, mesh, [Shard(0)]) if mesh else whole

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        return self.state

    def state_scalars(self) -> dict[str, Any]:
        return {"loss_scale": self.scale}

    def loaded(self, scalars: dict[str, Any]) -> None:
        self.scale = scalars["loss_scale"]
        self.refreshed += 1

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.state["parameter"].items():
            yield name, whole(tensor)

    def everything(self) -> dict[str, list[float]]:
        return {
            f"{kind}/{name}": whole(t).flatten().tolist() for kind, named in self.state.items() for name, t in named.items()
        }


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def write_model(folder: Path, parameters: Iterator[tuple[str, Tensor]]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in parameters}, folder / "model.safetensors")


def progress(update: int, **changes: Any) -> Progress:
    values = {"windows_per_epoch": 10, "rows_per_window": 4, "data_fingerprint": "f", "seed": 0}
    return Progress(update=update, window=update, **(values | changes))
