"""Checkpoints of a streamed run: the format of every other strategy, without a second copy of the state in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from muletrain.checkpoint import load, save, state
from muletrain.checkpoint.state import flat_state, read_state, write_state
from muletrain.models.build import build_on_meta
from muletrain.models.export import save_model_folder
from muletrain.spec.plan import ModelPlan
from muletrain.strategy.contract import Narrow, Strategy
from tests.checkpoint.toy import progress, write_model
from tests.dist.workers import run_workers
from tests.families.tiny import model_plan, tiny_llama, tiny_qwen3
from tests.strategy.runs import Run, advance, curve, start

NARROW: list[tuple[str, dict[str, Any]]] = [
    ("bf16", {"moments": "fp32"}),
    ("bf16", {"moments": "bf16", "gradients": "bf16"}),
    ("bf16", {"moments": "8bit", "gradients": "bf16", "piece": 4096}),
    ("fp16", {"moments": "8bit", "on_card": (0, 2)}),
]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> ModelPlan:
    """Tied, a prime vocabulary and norms: rows that do not end where blocks of 8-bit moments end."""
    return model_plan(tiny_qwen3(tmp_path_factory.mktemp("model") / "qwen3"))


def _bytes(strategy: Any) -> list[torch.Tensor]:
    """Every array of every unit's state, bit patterns."""
    arrays = [t for unit in strategy._device.units for t in (*unit.state.tensors(), unit.working)]
    return [array.clone().view(torch.uint8) for array in arrays]


@pytest.mark.parametrize(("compute", "streaming"), NARROW, ids=str)
def test_R01_resuming_gives_the_very_bits_of_a_run_that_was_not_stopped(
    tied: ModelPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compute: str, streaming: dict[str, Any]
) -> None:
    """Narrow state too, saved in chunks that cut its blocks."""
    monkeypatch.setattr(state, "_CHUNK_BYTES", 10_000)
    run = Run(tied, strategy="streamed", compute=compute, micro_batch=4, rate=1e-3, steps=4, streaming=streaming)
    strategy = start(run)
    advance(strategy, run, 0, 2)
    saved = save.save(tmp_path, strategy, progress(2), write_model, keep=1)
    expected = curve(advance(strategy, run, 2, 4))
    strategy.flush()
    fresh = start(replace(run, seed=run.seed))
    load.load(saved.path, fresh, load.read_progress(saved.path))
    assert curve(advance(fresh, run, 2, 4)) == expected
    fresh.flush()
    for one, other in zip(_bytes(strategy), _bytes(fresh), strict=True):
        assert torch.equal(one, other)


def _everything(strategy: Strategy) -> dict[str, torch.Tensor]:
    return {name: t.whole() if isinstance(t, Narrow) else t.clone() for name, t in flat_state(strategy).items()}


def test_R05_a_resident_run_reads_it_and_gives_it_back(tied: ModelPlan, tmp_path: Path) -> None:
    """Narrow state in a checkpoint is ordinary fp32; read into narrow state again, it is what it was."""
    run = Run(tied, strategy="streamed", compute="bf16", micro_batch=8, steps=1, streaming={"moments": "8bit"})
    one, resident, other = start(run), start(replace(run, strategy="resident")), start(replace(run, seed=8))
    advance(one, run, 0, 1)
    there = save.save(tmp_path / "there", one, progress(1), write_model, keep=1).path
    load.load(there, resident, load.read_progress(there))
    expected = _everything(one)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in _everything(resident).items())
    back = save.save(tmp_path / "back", resident, progress(1), write_model, keep=1).path
    load.load(back, other, load.read_progress(back))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(_bytes(one), _bytes(other), strict=True))


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def _added_bytes(action: Any) -> int:
    """By how much resident memory rose at most while `action` ran."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _status("VmRSS")
    action()
    return _status("VmHWM") - before


def _measured(rank: int, workers: int, model: ModelPlan, folder: str) -> dict[str, float]:
    """Bytes added by each part of a save and by a load, over those of the arena."""
    strategy: Any = start(Run(model, strategy="streamed", compute="bf16", streaming={"moments": "8bit", "gradients": "bf16"}))
    for unit in strategy._device.units:
        for array in (*unit.state.tensors()[2:], unit.gradient):  # touched, as after a step
            array.fill_(1)
    held = sum(t.nbytes for unit in strategy._device.units for t in (*unit.state.tensors(), unit.gradient))
    config = build_on_meta(model, dtype=torch.bfloat16, loss_chunk=8).config
    tensors = flat_state(strategy)

    def export() -> None:
        parameters = strategy.full_parameters()
        save_model_folder(Path(folder, "model"), config, parameters, dtype=torch.bfloat16, tokenizer_folder=None)

    actions = {
        "state": lambda: write_state(Path(folder, "state"), tensors),
        "model": export,
        "load": lambda: read_state(dcp.FileSystemReader(Path(folder, "state")), tensors),
    }
    return {"held": held} | {what: _added_bytes(action) / held for what, action in actions.items()}


def test_a_save_adds_under_5_percent_of_host_memory(tmp_path: Path) -> None:
    """92 M parameters in split masters and 8-bit moments, of which a whole fp32 copy would add 50 % and all state 150 %."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 7, "vocab_size": 1024}
    small = model_plan(tiny_llama(tmp_path / "small", num_attention_heads=8, num_key_value_heads=8, head_dim=128))
    model = small.model_copy(update={"config": small.config | sizes, "weights": "random"})
    (added,) = run_workers(1, _measured, model, str(tmp_path))
    assert added["held"] > 600 * 2**20
    assert added["state"] < 0.05 and added["model"] < 0.05
    assert added["load"] < 0.08  # one unit's full-precision copies
    assert sum(t.numel() for t in load_file(tmp_path / "model" / "model.safetensors").values()) > 80e6
