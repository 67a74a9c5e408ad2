"""AdamW against PyTorch's, and its independence of how parameters are cut."""

from __future__ import annotations

import itertools

import pytest
import torch

from muletrain.optim.adamw import ParameterState, adamw_update, decayed, update_scalars
from muletrain.spec.recipe import OptimizerSection

SECTION = OptimizerSection(learning_rate=1e-2, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1)


def state_of(master: torch.Tensor, decay: bool = True, working: torch.dtype | None = None) -> ParameterState:
    copy = None if working is None else master.to(working)
    return ParameterState("w", master, torch.zeros_like(master), torch.zeros_like(master), copy, decay)


def step(states: list[ParameterState], grads: list[torch.Tensor], update: int, scale: float = 1.0, apply: bool = True) -> None:
    factor = torch.tensor(scale, dtype=states[0].master.dtype)
    scalars = update_scalars(SECTION, SECTION.learning_rate, update, factor, torch.tensor(apply))
    adamw_update(states, grads, scalars, SECTION)


@pytest.mark.parametrize("decay", [True, False])
def test_follows_torch_adamw(decay: bool) -> None:
    torch.manual_seed(0)
    start = torch.randn(5, 7, dtype=torch.float64)
    theirs = torch.nn.Parameter(start.clone())
    reference = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1 if decay else 0.0)
    ours = state_of(start.clone(), decay)
    for update in range(50):
        grad = torch.randn(5, 7, dtype=torch.float64)
        theirs.grad = grad.clone()
        reference.step()
        step([ours], [grad * 8.0], update, scale=1 / 8.0)
    assert torch.allclose(ours.master, theirs, rtol=1e-12, atol=1e-12)


def test_the_same_bits_however_the_array_is_cut() -> None:
    torch.manual_seed(1)
    whole, grads = torch.randn(10_007), [torch.randn(10_007) for _ in range(5)]
    uncut = state_of(whole.clone())
    cuts = [0, 3, 1000, 1001, 5555, 10_007]
    flat = whole.clone()
    pieces = [state_of(flat[a:b]) for a, b in itertools.pairwise(cuts)]
    for update, grad in enumerate(grads):
        step([uncut], [grad], update, scale=0.37)
        step(pieces, [grad[a:b] for a, b in itertools.pairwise(cuts)], update, scale=0.37)
    assert torch.equal(flat, uncut.master)


def test_working_copy_is_the_rounded_master() -> None:
    torch.manual_seed(2)
    state = state_of(torch.randn(1000), working=torch.bfloat16)
    for update in range(3):
        step([state], [torch.randn(1000, dtype=torch.bfloat16)], update)
    assert torch.equal(state.working, state.master.bfloat16())


def test_a_refused_update_leaves_every_bit() -> None:
    state = state_of(torch.randn(100), working=torch.bfloat16)
    before = [t.clone() for t in (state.master, state.exp_avg, state.exp_avg_sq, state.working)]
    step([state], [torch.full((100,), float("nan"))], 0, apply=False)
    after = (state.master, state.exp_avg, state.exp_avg_sq, state.working)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_one_dimensional_parameters_are_not_decayed() -> None:
    assert decayed(torch.empty(2, 2)) and not decayed(torch.empty(4))
    plain, decayed_state = state_of(torch.ones(4), decay=False), state_of(torch.ones(4), decay=True)
    step([plain, decayed_state], [torch.zeros(4), torch.zeros(4)], 0)
    assert torch.equal(plain.master, torch.ones(4))
    assert torch.allclose(decayed_state.master, torch.full((4,), 1 - 1e-2 * 0.1))
