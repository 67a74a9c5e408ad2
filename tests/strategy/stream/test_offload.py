"""What a compiled backward may do with saved tensors that it was lent: write its results over them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from muletrain.strategy.stream.offload import Offload
from tests.families.tiny import tiny_llama
from tests.strategy import runs
from tests.strategy.test_adapter import adapted


def test_a_gradient_in_a_buffer_is_taken_out_of_it() -> None:
    offload = Offload(2, torch.device("cpu"))
    offload.place({1: 64}, 1, lambda size, dtype: torch.zeros(size, dtype=dtype))
    inside, outside = offload._ring[1][:32].view(torch.float32), torch.ones(8)
    inside.fill_(3.0)
    apart = offload.apart(inside)
    offload._ring[1].zero_()
    assert apart.tolist() == [3.0] * 8 and offload.apart(outside) is outside


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.skipif(" " in torch.__file__, reason="torch.compile does not quote the path of its libraries for the linker")
def test_compiled_blocks_that_offload_have_the_eager_ones_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an adapter the compiler does write the gradient of a block's input over a saved tensor."""
    run = runs.Run(adapted(tiny_llama(tmp_path, num_hidden_layers=3), dropout=0.0), compute="fp32", rate=1e-2, steps=2)
    plain = runs.plan_of

    def plan_of(*args: Any) -> Any:
        plan = plain(*args)
        return plan.model_copy(update={"train": plan.train.model_copy(update={"compile": True})})

    monkeypatch.setattr(runs, "plan_of", plan_of)
    whole = [replace(row, cu_seqlens=row.cu_seqlens[:0]) for row in runs.batches_of(0, run, 512)]
    monkeypatch.setattr(runs, "batches_of", lambda *args: whole)
    torch._dynamo.reset()
    offloaded = replace(run, strategy="streamed", streaming={"activations": ("offload",) * 3})
    compiled = runs.train_alone(offloaded)
    monkeypatch.setattr(runs, "plan_of", plain)
    expected = runs.train_alone(run)
    torch._dynamo.reset()
    assert runs.worst(compiled, expected) < 1e-5
