"""An adapter beside a model that streams through a GPU: the numbers of the model that is whole on it, and its state moves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from muletrain.strategy.contract import Narrow
from tests.families.tiny import tiny_llama
from tests.strategy.runs import Run, advance, curve, start, worst
from tests.strategy.test_adapter import adapted

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LAYOUTS = [
    {"inputs": "host", "on_card": (0, 4)},
    {"waves": 2, "on_card": (0, 2, 4), "activations": ("offload", "keep", "recompute")},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("compute", "bound"), [("fp32", 1e-5), ("bf16", 5e-3)])
def test_streamed_has_residents_numbers(tmp_path: Path, layout: dict[str, object], compute: str, bound: float) -> None:
    run = Run(adapted(tiny_llama(tmp_path, num_hidden_layers=3), dropout=0.0), compute=compute, rate=1e-2, steps=6)
    streamed = replace(run, strategy="streamed", streaming=layout)
    expected = curve(advance(start(run, device="cuda"), run, 0, 6))
    strategy = start(streamed, device="cuda")
    assert worst(curve(advance(strategy, streamed, 0, 6)), expected) < bound
    strategy.close()


def test_its_state_comes_back_to_the_bit(tmp_path: Path) -> None:
    run = Run(adapted(tiny_llama(tmp_path, num_hidden_layers=3)), compute="bf16", rate=1e-2, strategy="streamed")
    first, second = start(run, device="cuda"), start(run, device="cuda")
    advance(first, run, 0, 3)
    for kind, tensors in second.state_tensors().items():
        for name, target in tensors.items():
            source = first.state_tensors()[kind][name]
            if isinstance(target, Narrow):
                assert isinstance(source, Narrow)
                target.write(source.whole())
            else:
                target.copy_(source)
    second.loaded(first.state_scalars())
    assert curve(advance(first, run, 3, 6)) == curve(advance(second, run, 3, 6))
    for (name, left), (_, right) in zip(first.full_parameters(), second.full_parameters(), strict=True):
        assert torch.equal(left, right), name
