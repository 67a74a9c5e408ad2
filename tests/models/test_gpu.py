"""What only a GPU runs: the varlen kernel, the fused softmax, wide accumulation in half precision, compiled blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from muletrain.models.build import build_on_meta, materialize_buffers
from muletrain.models.causal import CausalModel, canonical_name
from muletrain.models.loss import chunked_cross_entropy
from muletrain.models.weights import open_weights
from muletrain.spec.plan import ModelPlan
from tests.families.tiny import model_plan, tiny_deepseek, tiny_gpt2, tiny_llama, tiny_qwen3
from tests.models.loading import packed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FAMILIES = pytest.mark.parametrize("family", [tiny_llama, tiny_deepseek, tiny_qwen3, tiny_gpt2])
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@torch.no_grad()
def _load(plan: ModelPlan, device: str, dtype: torch.dtype) -> CausalModel:
    model = build_on_meta(plan, dtype=dtype, loss_chunk=32)
    source = open_weights(plan, model, 0)
    model.to_empty(device=device)
    materialize_buffers(model, device)
    for name, parameter in model.named_parameters():
        parameter.copy_(source.tensor(canonical_name(name)))
    return model


def _batch(device: str, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(1, 500, (n,), generator=generator) for n in (40, 1, 60, 20, 100)]
    return tuple(tensor.to(device) for tensor in packed(documents[:3], documents[3:], length=128))


@FAMILIES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_P01_packed_loss_and_gradients_equal_the_cpus_in_fp64(
    family: Callable[..., Path], dtype: torch.dtype, tmp_path: Path
) -> None:
    plan = model_plan(family(tmp_path, initializer_range=0.1))
    exact, model = _load(plan, "cpu", torch.float64), _load(plan, "cuda", dtype)
    ids, labels, positions, bounds = _batch("cpu")
    expected = exact(ids, labels, positions, bounds, 100)
    ids, labels, positions, bounds = _batch("cuda")
    actual = model(ids, labels, positions, bounds, 100)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    assert actual.item() == pytest.approx(expected.item(), rel=tolerance)
    for (name, ours), theirs in zip(
        zip(dict(model.named_parameters()), torch.autograd.grad(actual, list(model.parameters())), strict=True),
        torch.autograd.grad(expected, list(exact.parameters())),
        strict=True,
    ):
        error = (ours.cpu().double() - theirs).norm() / theirs.norm()
        assert error < {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype], (name, error)


@FAMILIES
def test_P01_a_changed_neighbour_changes_nothing(family: Callable[..., Path], tmp_path: Path) -> None:
    model = _load(model_plan(family(tmp_path)), "cuda", torch.bfloat16)
    ids, _, positions, bounds = _batch("cuda")
    before = model.hidden_states(ids, positions, bounds, 100)
    ids = ids.clone()
    ids[0, :41] = 7
    after = model.hidden_states(ids, positions, bounds, 100)
    assert torch.equal(before[0, 41:], after[0, 41:]) and torch.equal(before[1], after[1])
    assert not torch.equal(before[0, :41], after[0, :41])


@HALF
def test_plain_rows_equal_rows_packed_alone(dtype: torch.dtype, tmp_path: Path) -> None:
    model = _load(model_plan(tiny_llama(tmp_path)), "cuda", dtype)
    ids = torch.randint(0, 500, (2, 128), generator=torch.Generator().manual_seed(1)).cuda()
    positions = torch.arange(128, device="cuda").expand(2, 128)
    plain = model.hidden_states(ids, positions, torch.empty(0, dtype=torch.int32, device="cuda"), 0)
    bounds = torch.tensor([0, 128, 256, 256], dtype=torch.int32, device="cuda")
    torch.testing.assert_close(model.hidden_states(ids, positions, bounds, 128), plain, rtol=2e-2, atol=5e-2)


@FAMILIES
def test_compiled_blocks_have_no_graph_break(family: Callable[..., Path], tmp_path: Path) -> None:
    model = _load(model_plan(family(tmp_path)), "cuda", torch.bfloat16)
    ids, labels, positions, bounds = _batch("cuda")
    expected = model(ids, labels, positions, bounds, 100)
    for layer in model.layers:
        layer.compile(fullgraph=True)
    actual = model(ids, labels, positions, bounds, 100)
    actual.backward()
    assert actual.item() == pytest.approx(expected.item(), rel=1e-2)
    plain = model(ids, labels, positions, bounds[:0], 0)
    plain.backward()
    assert plain.isfinite()


@HALF
def test_loss_equals_fp64(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(1000, 64, generator=generator), torch.randn(5001, 64, generator=generator) * 0.1
    labels = torch.randint(0, 5001, (1000,), generator=generator)
    labels[::3] = -100
    inputs = [t.to("cuda", dtype).requires_grad_() for t in (hidden, weight)]
    scale = 2.0**10
    loss = chunked_cross_entropy(*inputs, labels.cuda(), 256, None, scale)
    exact = [t.detach().double().cpu().requires_grad_() for t in inputs]
    expected = cross_entropy(exact[0] @ exact[1].t(), labels, reduction="sum")
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
    for ours, theirs in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, exact), strict=True):
        error = (ours.cpu().double() / scale - theirs).norm() / theirs.norm()
        assert error < (2e-2 if dtype == torch.bfloat16 else 3e-3)


def test_M06_peak_is_a_chunk_of_logits_and_the_gradients() -> None:
    rows, vocab, width, chunk = 4096, 152_064, 512, 512
    hidden = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, vocab, (rows,), device="cuda")
    for _ in range(2):  # the first call compiles
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(chunked_cross_entropy(hidden, weight, labels, chunk), (hidden, weight))
        peak = torch.cuda.max_memory_allocated() - before
    logits, wide, narrow = chunk * vocab * 2, vocab * width * 4, vocab * width * 2
    assert peak < 1.1 * max(wide + logits + hidden.nbytes, wide + narrow + hidden.nbytes)
