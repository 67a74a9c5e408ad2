"""Light stand-ins for a model's layers, because Transformers loops over the layers itself.

A model's own forward then serves three purposes, by the mode of the `Stage` that its proxies share:

  capture  each proxy returns its input and records its arguments: what runs is the prologue (embedding, masks, rotary)
  replay   the last proxy returns the final hidden state it was given: what runs is the epilogue (norm)
  run      each proxy has its block fetched out of turn and calls it; so the shape of a family's output is learnt

So nothing of a family's code is written again here. Rejected: calling layers with arguments of our own making, which every
family and every Transformers release would break.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

RunBlock = Callable[[int, Tensor, "Call"], Any]


@dataclass(frozen=True)
class Call:
    """The arguments of one layer in one micro-batch, beside the hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Captured:
    """What the prologue of one micro-batch gave."""

    hidden: Tensor
    """[B, S, H]: the first block's input, with its graph."""
    calls: list[Call]


@dataclass
class Stage:
    """What the proxies of one model share."""

    run_block: RunBlock
    """(layer, hidden, call) -> the block's raw output."""
    mode: Literal["capture", "replay", "run"] = "run"
    calls: list[Call] = field(default_factory=list)
    first: Tensor | None = None
    final: Tensor | None = None
    wrapped: bool | None = None
    """Whether layers return a tuple whose first item is the hidden state; learnt from the first real call."""

    def shaped(self, hidden: Tensor) -> Any:
        """`hidden` as a layer of this family returns it."""
        return (hidden,) if self.wrapped else hidden


class LayerProxy(nn.Module):
    """Stands where `block` stood; keeps its plain attributes (a model may ask for an attention type), not its tensors."""

    def __init__(self, stage: Stage, layer: int, last: bool, block: nn.Module) -> None:
        super().__init__()
        for name, value in vars(block).items():
            if isinstance(value, (str, int, float)) and not name.startswith("_") and name != "training":
                setattr(self, name, value)
        self._stage, self._layer, self._last = stage, layer, last

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See the module's docstring."""
        stage, call = self._stage, Call(args, kwargs)
        if stage.mode == "run":
            return stage.run_block(self._layer, hidden_states, call)
        if stage.mode == "replay":
            return stage.shaped(stage.final if self._last else hidden_states)  # type: ignore[arg-type]
        if stage.wrapped is None:
            stage.wrapped = isinstance(stage.run_block(self._layer, hidden_states.detach(), call), tuple)
        if self._layer == 0:
            stage.first, stage.calls = hidden_states, []
        stage.calls.append(call)
        return stage.shaped(hidden_states)


def hidden_of(output: Any) -> Tensor:
    """The hidden state in a layer's raw output."""
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]
