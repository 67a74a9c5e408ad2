"""CausalModel under FSDP2: built on meta, sharded, filled tensor by tensor; tied weights stay tied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from muletrain.models.build import build_on_meta, materialize_buffers
from muletrain.models.causal import canonical_name
from muletrain.models.weights import open_weights
from muletrain.spec.plan import ModelPlan
from tests.dist.workers import run_workers
from tests.families.tiny import model_plan, tiny_gpt2, tiny_llama, tiny_qwen3
from tests.models.loading import load, packed


def _batch() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return packed([torch.randint(1, 500, (n,), generator=generator) for n in (9, 20, 3)], length=32)


def _sharded(rank: int, workers: int, plan: ModelPlan) -> tuple[float, dict[str, object], bool]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh = init_device_mesh("cpu", (workers,))
    model = build_on_meta(plan, dtype=torch.float64, loss_chunk=7)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    source = open_weights(plan, model, 0)
    model.to_empty(device="cpu")
    materialize_buffers(model, "cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            whole = source.tensor(canonical_name(name)).double()
            parameter.to_local().copy_(distribute_tensor(whole, mesh, parameter.placements).to_local())
    ids, labels, positions, bounds = _batch()
    loss = model(ids, labels, positions, bounds, 20)
    loss.backward()
    gradients = {canonical_name(name): p.grad.full_tensor().numpy() for name, p in model.named_parameters()}
    return loss.item(), gradients, model.tied


@pytest.mark.parametrize("family", [tiny_llama, tiny_qwen3, tiny_gpt2])
def test_C06_sharded_model_computes_what_the_whole_one_does(family: Callable[..., Path], tmp_path: Path) -> None:
    plan = model_plan(family(tmp_path))
    shards = run_workers(2, _sharded, plan)  # before this process runs a backward, whose threads would not survive a fork
    whole = load(plan, dtype=torch.float64, loss_chunk=7)
    ids, labels, positions, bounds = _batch()
    expected = whole(ids, labels, positions, bounds, 20)
    expected.backward()
    for loss, gradients, tied in shards:
        assert tied == whole.tied == plan.shape.tied
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        assert gradients.keys() == {canonical_name(name) for name, _ in whole.named_parameters()}
        for name, parameter in whole.named_parameters():
            actual = torch.from_numpy(gradients[canonical_name(name)])
            torch.testing.assert_close(actual, parameter.grad, rtol=1e-9, atol=1e-12)  # FSDP averages equal gradients
