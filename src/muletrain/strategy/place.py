"""Putting a parameter and its optimizer state where they live for the run, one whole tensor at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from muletrain.models.weights import WeightSource
from muletrain.optim.adamw import ParameterState, decayed
from muletrain.optim.master import as_bits, round_master
from muletrain.precision.policy import Precision
from muletrain.strategy.contract import Narrow


@torch.no_grad()
def place_parameter(name: str, parameter: Tensor, weights: WeightSource, precision: Precision) -> ParameterState:
    """Fills `parameter` (compute dtype) from `weights` and makes its master copy and moments beside it, on its device."""
    whole = weights.tensor(name).to(parameter.device, precision.master)
    round_master(whole, as_bits(parameter))
    master = whole if precision.split else parameter.detach()
    moments = torch.zeros_like(master), torch.zeros_like(master)
    working = parameter.detach() if precision.split else None
    return ParameterState(name, master, *moments, working, decayed(parameter))


@torch.no_grad()
def place_frozen(name: str, parameter: Tensor, weights: WeightSource) -> None:
    """Fills `parameter`, which is never trained, in its own dtype."""
    parameter.copy_(weights.tensor(name))


def by_kind(states: list[ParameterState]) -> dict[str, dict[str, Tensor | Narrow]]:
    """The states' live tensors as Strategy.state_tensors gives them."""
    return {kind: {state.name: getattr(state, field) for state in states} for kind, field in _FIELDS}


_FIELDS = (("parameter", "master"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"))


@torch.no_grad()
def round_masters(states: list[ParameterState]) -> None:
    """Working copies afresh from the masters."""
    for state in states:
        if state.working is not None:
            round_master(state.master, as_bits(state.working))
