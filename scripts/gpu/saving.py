"""What saving and loading a streamed run adds to host memory, how long it takes, and that the same bytes come back."""

from __future__ import annotations

import argparse
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from muletrain.checkpoint.index import StateReader
from muletrain.checkpoint.state import flat_state, read_state, write_state
from muletrain.models.build import build_on_meta
from muletrain.models.export import save_model_folder
from muletrain.strategy.apply import build_strategy

from .setting import DrawnOnDevice, cap_memory, device_here, plan_for, text_corpus
from .streamed import steps


def saving_part(options: argparse.Namespace) -> dict[str, Any]:
    """One line each for the state written, the model folder written, and the state read back over zeros."""
    cap_memory(round(options.card_gib * 2**30))
    with tempfile.TemporaryDirectory(dir=options.scratch) as name:
        folder = Path(name)
        text_corpus(folder)
        strategy, config, memory = _trained(folder, options)
        tensors, before = flat_state(strategy), _checksums(strategy)

        def export() -> None:
            parameters = strategy.full_parameters()
            save_model_folder(folder / "model", config, parameters, dtype=torch.bfloat16, tokenizer_folder=None)

        def load() -> None:
            read_state(StateReader(folder / "state"), tensors)
            strategy.loaded(strategy.state_scalars())

        record: dict[str, Any] = {"arena_gib": memory / 2**30}
        for what, action in (("state", lambda: write_state(folder / "state", tensors)), ("model", export)):
            record[what] = _measured(what, action, memory)
        for unit in strategy._device.units:
            for array in unit.state.tensors():
                array.zero_()
        record["load"] = _measured("load", load, memory)
        record["same_bytes"] = _checksums(strategy) == before
        print(f"the same bytes came back: {record['same_bytes']}", flush=True)
        strategy.close()
    return record


def _trained(folder: Path, options: argparse.Namespace) -> tuple[Any, Any, int]:
    """(a strategy after a few steps, the model's config, bytes of state and gradients)."""
    keys: dict[str, dict[str, Any]] = {
        "train": {"tokens_per_step": options.tokens, "micro_batch": 1, "optimizer": {"state": options.moments}},
        "precision": {"compute": "bf16"},
        "memory": {"strategy": "streamed"},
    }
    plan = plan_for(folder, options.shape, keys, sequence=options.sequence, card_bytes=round(options.card_gib * 2**30))
    model = build_on_meta(plan.model, dtype=torch.bfloat16, loss_chunk=plan.memory.loss_chunk)
    config = model.config
    strategy: Any = build_strategy(plan, model, DrawnOnDevice(model), device_here())
    steps(plan, strategy, 3)
    strategy.flush()
    units = strategy._device.units
    return strategy, config, sum(t.nbytes for unit in units for t in (*unit.state.tensors(), unit.gradient) if not t.is_cuda)


def _measured(what: str, action: Callable[[], None], memory: int) -> dict[str, float]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before, start = _resident_bytes("VmRSS"), time.perf_counter()
    action()
    seconds, added = time.perf_counter() - start, _resident_bytes("VmHWM") - before
    print(
        f"{added / memory:6.1%} of {memory / 2**30:.1f} GiB added ({added / 2**20:.0f} MiB) in {seconds:.1f} s: {what}",
        flush=True,
    )
    return {"added_bytes": added, "added_share": added / memory, "seconds": seconds}


def _resident_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


def _checksums(strategy: Any) -> list[int]:
    arrays = [array for unit in strategy._device.units for array in (*unit.state.tensors(), unit.working)]
    return [zlib.crc32(array.cpu().view(torch.uint8).numpy()) for array in arrays]
