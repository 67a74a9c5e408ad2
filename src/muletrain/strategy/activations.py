"""How one block runs: what it keeps for backward, whether it is compiled, and which random stream it draws from.

Recomputation belongs to the block's own backward graph. Compiled, it is the partitioner's activation memory budget; eager, it
is a non-reentrant checkpoint, which stops as soon as the last saved tensor is back: the down projection is not done again.
Rejected: reentrant checkpointing, which gives no gradient to adapters behind a frozen embedding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from muletrain.strategy.randomness import KeyedRandom


def prepare_block(block: nn.Module, activations: Literal["keep", "recompute"], compiled: bool, preserve_random: bool) -> None:
    """Changes how `block` runs, in place: its parameters and their names stay what they were.

    `forward` is replaced on the instance, so hooks (FSDP's, the seeding one) stay outside the compiled or checkpointed part.
    """
    forward = block.forward
    if compiled:
        torch._functorch.config.activation_memory_budget = 0.0 if activations == "recompute" else 1.0
        block.forward = torch.compile(forward)
        return
    if activations == "keep":
        return

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=preserve_random, **kwargs)

    block.forward = recomputed


def keeping(block: nn.Module, compiled: bool) -> Callable[..., Any]:
    """`block` run so that its graph keeps all that backward needs, beside the way in which prepare_block makes it run."""
    if not compiled:
        return functools.partial(type(block).forward, block)
    run = torch.compile(_keep)

    def kept(*args: Any, **kwargs: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=1.0):
            return run(block, *args, **kwargs)

    return kept


def _keep(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A function of its own, because graphs are found by the code that they were compiled from."""
    return type(block).forward(block, *args, **kwargs)


def seed_before(block: nn.Module, layer: int, random: KeyedRandom) -> None:
    """Makes each call of `block` draw from its own keyed stream."""
    if random.enabled:
        block.register_forward_pre_hook(lambda *_: random.enter(layer), prepend=True)
