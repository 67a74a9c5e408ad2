"""CausalModel against Transformers, family by family; packing; labels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from muletrain.models.causal import CausalModel, canonical_name
from tests.families.tiny import model_plan, tiny_deepseek, tiny_gpt2, tiny_llama, tiny_qwen3
from tests.models.loading import load, packed

FAMILIES = pytest.mark.parametrize("family", [tiny_llama, tiny_deepseek, tiny_qwen3, tiny_gpt2])
NONE = torch.empty(0, dtype=torch.int32)


def _ids(vocab: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


def _positions(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1]).expand_as(ids)


def _logits(model: CausalModel, hidden: Tensor) -> Tensor:
    return torch.nn.functional.linear(hidden, model.head.weight)


@FAMILIES
def test_logits_loss_and_gradients_equal_transformers(family: Callable[..., Path], tmp_path: Path) -> None:
    folder = family(tmp_path)
    ours = load(model_plan(folder), loss_chunk=17)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    ids = _ids(500, 3, 40)
    hidden = ours.hidden_states(ids, _positions(ids), NONE, 0)
    torch.testing.assert_close(_logits(ours, hidden), theirs(ids).logits, rtol=0, atol=1e-5)
    labels = torch.cat([ids[:, 1:], torch.full((3, 1), -100)], 1)
    loss = ours(ids, labels, _positions(ids), NONE, 0)
    reference = theirs(ids, labels=ids).loss * (3 * 39)
    assert loss.item() == pytest.approx(reference.item(), rel=1e-6)
    loss.backward()
    reference.backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[canonical_name(name)].grad, rtol=1e-4, atol=1e-4)


@FAMILIES
def test_P01_packed_documents_do_not_see_each_other(family: Callable[..., Path], tmp_path: Path) -> None:
    model = load(model_plan(family(tmp_path)))
    first, second, other = _ids(500, 13, seed=1), _ids(500, 24, seed=2), _ids(500, 13, seed=3)
    alone = model.hidden_states(second[None], _positions(second[None]), NONE, 0)[0]
    for neighbour in (first, other):
        ids, _, positions, bounds = packed([neighbour, second], length=48)
        together = model.hidden_states(ids, positions, bounds, 24)[0, 13:37]
        torch.testing.assert_close(
            _token_losses(model, together, second), _token_losses(model, alone, second), rtol=0, atol=1e-5
        )


def _token_losses(model: CausalModel, hidden: Tensor, ids: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(_logits(model, hidden[:-1]), ids[1:], reduction="none")


@FAMILIES
def test_P02_neither_positions_nor_attention_reach_across(family: Callable[..., Path], tmp_path: Path) -> None:
    """Bounds without restarted positions, or restarted positions without bounds, give other numbers: both are needed."""
    model = load(model_plan(family(tmp_path)))
    ids, _, positions, bounds = packed([_ids(500, 13, seed=1), _ids(500, 24, seed=2)], length=37)
    right = model.hidden_states(ids, positions, bounds, 24)[0, 13:]
    leaking = model.hidden_states(ids, positions, NONE, 0)[0, 13:]
    assert (right - leaking).abs().max() > 1e-3
    if model.config.model_type == "gpt2":  # rotary attention depends on distances only
        moved = model.hidden_states(ids, _positions(ids), bounds, 24)[0, 13:]
        assert (right - moved).abs().max() > 1e-3


@FAMILIES
@pytest.mark.parametrize("rows", [[[16]], [[16], [16]], [[1]], [[1] * 16], [[15, 1], [3]], [[5, 5, 5], [1], [16]]])
def test_P07_edge_shapes_of_packing_give_the_unpacked_loss(
    family: Callable[..., Path], tmp_path: Path, rows: list[list[int]]
) -> None:
    model = load(model_plan(family(tmp_path)), loss_chunk=5)
    documents = [[_ids(500, n, seed=10 * row + n) for n in lengths] for row, lengths in enumerate(rows)]
    ids, labels, positions, bounds = packed(*documents, length=16)
    together = model(ids, labels, positions, bounds, 16).item()
    alone = 0.0
    for document in (document[None] for row in documents for document in row):
        targets = torch.cat([document[:, 1:], torch.full((1, 1), -100)], 1)
        alone += model(document, targets, _positions(document), NONE, 0).item()
    assert together == pytest.approx(alone, rel=1e-6, abs=1e-6)


def test_N15_labels_are_not_shifted_again(tmp_path: Path) -> None:
    """Trained on abcabc with aligned labels, the loss goes to 0 and the likeliest next token is the next letter."""
    folder = tiny_llama(tmp_path)
    model = load(model_plan(folder))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.tensor([[10, 11, 12] * 8])
    labels = torch.tensor([[*([11, 12, 10] * 8)[:-1], -100]])
    for _ in range(150):
        loss = model(ids, labels, _positions(ids), NONE, 0) / 23
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.01
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    theirs.load_state_dict(model.hf.state_dict())
    assert theirs(ids).logits[0, -3:].argmax(-1).tolist() == [11, 12, 10]
    assert theirs.generate(ids, max_new_tokens=4, do_sample=False)[0, -4:].tolist() == [10, 11, 12, 10]


@FAMILIES
def test_no_mask_of_length_squared_is_built(family: Callable[..., Path], tmp_path: Path) -> None:
    model = load(model_plan(family(tmp_path)))
    seen: list[object] = []

    def spy(module: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        seen.append(kwargs.get("attention_mask"))
        seen.extend(a for a in args if isinstance(a, Tensor) and a.ndim == 4)

    for layer in model.layers:
        layer.register_forward_pre_hook(spy, with_kwargs=True)
    ids, _, positions, bounds = packed([_ids(500, 9), _ids(500, 7)], length=16)
    model.hidden_states(ids, positions, bounds, 9)
    assert seen == [None, None]


def test_blocks_can_be_replaced(tmp_path: Path) -> None:
    model = load(model_plan(tiny_llama(tmp_path)))
    ids = _ids(500, 1, 8)
    before = model.hidden_states(ids, _positions(ids), NONE, 0)

    class Skip(torch.nn.Module):
        def forward(self, hidden: Tensor, *args: object, **kwargs: object) -> Tensor:
            return hidden

    kept = model.layers[1]
    model.layers[1] = Skip()
    assert not torch.allclose(model.hidden_states(ids, _positions(ids), NONE, 0), before)
    model.layers[1] = kept
    assert torch.equal(model.hidden_states(ids, _positions(ids), NONE, 0), before)


@pytest.mark.parametrize(
    ("family", "overrides", "expected"),
    [
        (tiny_llama, {}, (False, False)),
        (tiny_llama, {"attention_dropout": 0.1}, (False, True)),
        (tiny_qwen3, {}, (True, False)),
        (tiny_gpt2, {}, (True, False)),
        (tiny_gpt2, {"attn_pdrop": 0.1}, (True, True)),
        (tiny_gpt2, {"embd_pdrop": 0.1}, (True, True)),
    ],
)
def test_tied_and_dropout_are_read_off_the_model(
    family: Callable[..., Path], overrides: dict[str, float], expected: tuple[bool, bool], tmp_path: Path
) -> None:
    model = load(model_plan(family(tmp_path, **overrides)))
    assert (model.tied, model.has_dropout) == expected


def test_canonical_names_are_transformers_own() -> None:
    assert canonical_name("hf.model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert canonical_name("hf.model.layers.0._orig_mod.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert canonical_name("hf.model.layers.0._checkpoint_wrapped_module.mlp.w") == "model.layers.0.mlp.w"
