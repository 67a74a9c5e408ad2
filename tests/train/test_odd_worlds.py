"""O14: heads, hidden width, vocabulary and batch that the number of workers does not divide. Sharding pads; nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from muletrain.spec.errors import EXIT_DONE, EXIT_STOPPED
from tests.families.tiny import model_plan, tiny_llama, tiny_qwen3
from tests.train.tiny import Materials, make_plan, record_of, run, steps_of

MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "L": (tiny_llama, {}),  # hidden 64, 4 heads, 2 key heads, 512 words
    "H": (tiny_llama, {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 500}),
    "Q": (tiny_qwen3, {}),  # tied, 509 words, a prime
}
CASES = [(model, workers, "zero3") for model in MODELS for workers in (3, 5)] + [
    ("Q", 5, strategy) for strategy in ("resident", "zero1", "zero2")
]


class _Reference:
    """One worker's losses, norms and weights, made once a model."""

    def __init__(self, folder: Path, materials: Materials) -> None:
        self._folder, self._materials, self._made = folder, materials, set[str]()

    def plan(self, model: str, run_dir: Path, **changes: Any) -> Any:
        source = self._folder / f"tiny{model}"
        if not source.exists():
            make, fields = MODELS[model]
            make(source, **fields)
        run_dir.mkdir(parents=True, exist_ok=True)
        plan = make_plan(self._materials, run_dir, steps=2, **changes)
        return plan.model_copy(update={"model": model_plan(source)})

    def run_dir(self, model: str) -> Path:
        folder = self._folder / f"one-{model}"
        if model not in self._made:
            assert run(self._materials, self.plan(model, folder)) == EXIT_DONE
            self._made.add(model)
        return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory, materials) -> _Reference:
    return _Reference(tmp_path_factory.mktemp("odd"), materials)


def _weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "checkpoints" / "step-00000002" / "model" / "model.safetensors")


@pytest.mark.parametrize(("model", "workers", "strategy"), CASES)
def test_O14_any_number_of_workers_trains_and_saves_what_one_does(reference, materials, tmp_path, model, workers, strategy):
    one = reference.run_dir(model)
    plan = reference.plan(model, tmp_path, workers=workers, strategy=strategy)
    assert run(materials, plan) == EXIT_DONE
    assert record_of(tmp_path).workers == workers
    for mine, theirs in zip(steps_of(tmp_path), steps_of(one), strict=True):
        assert mine["tokens"] == theirs["tokens"], "4 micro-batches, dealt to 3 or 5 workers"
        for key in ("loss", "grad_norm"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-5)
    saved, expected = _weights(tmp_path), _weights(one)
    assert saved.keys() == expected.keys()
    for name, tensor in saved.items():
        assert tensor.shape == expected[name].shape
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6)


def test_O14_what_five_workers_saved_goes_on_on_three(reference, materials, tmp_path):
    plan = reference.plan("Q", tmp_path, workers=5, strategy="zero3")
    assert run(materials, plan, stop_after=1) == EXIT_STOPPED
    assert run(materials, reference.plan("Q", tmp_path, workers=3, strategy="zero2")) == EXIT_DONE
    expected = [event["loss"] for event in steps_of(reference.run_dir("Q"))]
    assert [event["loss"] for event in steps_of(tmp_path)] == pytest.approx(expected, rel=1e-5)


def test_O14_S04_padding_is_that_of_the_data_on_any_number_of_workers(reference, materials, tmp_path):
    counts = []
    for workers in (1, 3, 5):
        folder = tmp_path / str(workers)
        assert run(materials, reference.plan("L", folder, workers=workers, packing="none")) == EXIT_DONE
        counts.append([(event["tokens"], event["padding_tokens"]) for event in steps_of(folder)])
    assert counts[0] == counts[1] == counts[2] and all(padding > 0 for _, padding in counts[0])
