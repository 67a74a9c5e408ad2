"""O17: one compiled graph serves every block and every batch, however many documents a row holds.

Runs on a CPU with a backend that compiles nothing, so only what triggers compilation is tested; attention over segments is an
opaque operator here, as it is on a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from muletrain.data.prepare import prepare
from muletrain.data.stream import TrainingStream
from muletrain.models import attention
from muletrain.spec.plan import ModelPlan
from muletrain.strategy.contract import StepContext
from tests.strategy import runs
from tests.strategy.test_adapter import adapted
from tests.strategy.test_packing import data_plan


@torch.library.custom_op("muletrain_tests::segments", mutates_args=())
def _segments(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, most: int) -> torch.Tensor:
    return attention._by_segment(query, key, value, bounds, 0.0, query.shape[-1] ** -0.5).clone()


@_segments.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, most: int) -> torch.Tensor:
    return torch.empty_like(query)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    query, key, value = ctx.saved_tensors
    return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value), None, None


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


_segments.register_autograd(_backward, setup_context=_save)


@pytest.mark.parametrize("with_adapter", [False, True], ids=["full", "adapter"])
@pytest.mark.parametrize("strategy", ["resident", "streamed"])
def test_O17_blocks_compile_once(
    models: dict[str, ModelPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, with_adapter: bool
) -> None:
    """Under an adapter one more for resident's first block, below which nothing is trained: its backward ends there."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled(function, backend="aot_eager", **options))
    monkeypatch.setattr(attention, "_varlen_can", lambda query, value: True)
    monkeypatch.setattr(
        attention, "varlen_attn", lambda q, k, v, bounds, _, most, __, **options: _segments(q, k, v, bounds, most)
    )
    plain = runs.plan_of

    def plan_of(*args: Any) -> Any:
        plan = plain(*args)
        return plan.model_copy(update={"train": plan.train.model_copy(update={"compile": True})})

    monkeypatch.setattr(runs, "plan_of", plan_of)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = adapted(Path(models["llama"].source)) if with_adapter else models["llama"]
    run = runs.Run(model, strategy=strategy, compute="fp32", activations="recompute")
    engine = runs.start(run)
    prepared = prepare(data_plan(tmp_path, run.model.source, "best_fit"))
    stream = TrainingStream(prepared, sequence_length=64, packing="best_fit", micro_batch=2, micro_batches=2, seed=0)
    lengths = set()
    for window in range(4):
        batches = stream.window(window, 0, 1)
        lengths |= {len(batch.cu_seqlens) for batch in batches}
        engine.step(batches, StepContext(window, window, 1e-3))
    assert len(lengths - {0}) > 1, "the batches are to differ in their number of documents"
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    ways = 2 if with_adapter and strategy == "resident" else 1
    assert graphs <= ways * (2 if 0 in lengths else 1), "one graph for rows of several documents, one for rows of a single one"
    torch._dynamo.reset()
