"""How AdamW's two moments are kept between updates: fp32, bf16 with stochastic rounding, or 8 bits a number in blocks.

An update always computes in full precision on decoded values; a format only decides what survives until the next one. Rounding
is stochastic wherever a format rounds: the second moment moves by (1 - beta2) of itself an update, under half a step of bf16
or of an 8-bit code, so nearest rounding would freeze it.

8 bits: blocks of 256 numbers share one fp32 scale, the largest magnitude. Codes lie on a fourth-power curve, value = scale x
(code / levels)^4, with 127 levels and a sign for the first moment, 255 for the second. For the second moment neighbouring codes
differ by 1.6 % at the largest number and 5 % at a hundredth of it (3 % and 10 % for the first), and the smallest is 2.4e-10 of
the largest: gradients in a block may differ by 6e4. A second moment that isn't zero never becomes zero, which would turn the
next step into first moment / epsilon; except in a block whose largest number is under 2^-94, all of which become zero: its root
is 7e-15, and epsilon rules the step anyway. So every code stands for a normal fp32 number, and decoding and encoding again
gives the same bytes: a checkpoint in fp32 loses nothing. Rejected: linear codes (small second moments vanish), a searched table
as in dynamic quantisation (Dettmers et al. 2022: a gather a number, and its gaps at powers of ten), logarithmic codes (log and
exp differ in the last bit between devices and vector widths, square roots do not).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from muletrain.optim.rounding import stochastic_bfloat16

BLOCK = 256
"""Numbers that share a scale. Units, regions and pieces start at multiples of it, so that no block straddles two of them."""
_LEAST_SCALE = 2.0**-94
"""Times (1 / 255)^4 it is still a normal number."""
MomentKind = Literal["fp32", "bf16", "8bit"]


@dataclass(frozen=True)
class Moment:
    """One moment of a flat array of n numbers, in some format."""

    values: Tensor
    """[n]: the numbers, or their codes."""
    scales: Tensor | None = None
    """[n / 256], fp32: only with 8 bits."""

    def part(self, start: int, stop: int) -> Moment:
        """A view of numbers start to stop, both multiples of 256."""
        scales = None if self.scales is None else self.scales[start // BLOCK : stop // BLOCK]
        return Moment(self.values[start:stop], scales)

    def tensors(self) -> tuple[Tensor, ...]:
        """What has to be moved or saved."""
        return (self.values,) if self.scales is None else (self.values, self.scales)


@dataclass(frozen=True)
class MomentFormat:
    """The format of one moment. `decode` and `encode` are pure, on blocked tensors: [n / 256, 256], scales [n / 256, 1]."""

    kind: MomentKind
    signed: bool
    """True for the first moment."""
    full: torch.dtype = torch.float32
    """What the update computes in; fp64 with fp64 masters, whose moments are then fp64 under the kind "fp32"."""

    def __post_init__(self) -> None:
        if self.kind != "fp32" and self.full != torch.float32:
            raise ValueError(f"moments of kind {self.kind} belong to fp32 masters, not {self.full}")

    @property
    def dtype(self) -> torch.dtype:
        """Of `Moment.values`."""
        if self.kind == "8bit":
            return torch.int8 if self.signed else torch.uint8
        return torch.bfloat16 if self.kind == "bf16" else self.full

    @property
    def bytes_a_parameter(self) -> float:
        """Bytes of one number, its share of the scale included."""
        return self.dtype.itemsize + (4 / BLOCK if self.kind == "8bit" else 0)

    @property
    def _levels(self) -> float:
        return 127.0 if self.signed else 255.0

    def allocate(self, n: int, device: torch.device | str = "cpu") -> Moment:
        """Zeros for n numbers, n a multiple of 256."""
        if n % BLOCK:
            raise ValueError(f"{n} numbers: flat arrays hold multiples of {BLOCK}")
        scales = torch.zeros(n // BLOCK, device=device) if self.kind == "8bit" else None
        return Moment(torch.zeros(n, dtype=self.dtype, device=device), scales)

    def load(self, moment: Moment) -> Tensor:
        """[n] in full precision; a NaN scale makes its whole block NaN."""
        return self.decode(blocked(moment)).view(-1)

    def store(self, moment: Moment, values: Tensor, noise: Tensor) -> None:
        """Overwrites `moment` by full-precision `values` [n]; `noise` [n] int32 is uniform in [0, 65536) (rounding.halves)."""
        new = self.encode(values.reshape(-1, BLOCK), noise.reshape(-1, BLOCK))
        for old, fresh in zip(blocked(moment), new, strict=True):
            old.copy_(fresh)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        """Blocked numbers in full precision."""
        if self.kind != "8bit":
            return stored[0].to(self.full)
        codes, scales = stored
        return _fourth_power(codes.to(self.full) / self._levels) * scales

    def encode(self, values: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        """What `decode` reads. A number that isn't finite makes its 8-bit block one whose scale isn't."""
        if self.kind == "fp32":
            return (values,)
        if self.kind == "bf16":
            return (stochastic_bfloat16(values, noise),)
        magnitude = values.abs()
        scales = magnitude.amax(dim=1, keepdim=True)
        vanishes = scales < _LEAST_SCALE
        scales, magnitude = torch.where(vanishes, 0.0, scales), torch.where(vanishes, 0.0, magnitude)
        share = (magnitude / torch.where(scales > 0, scales, 1.0)).clamp(max=1.0)
        below = (share.sqrt().sqrt() * self._levels).floor().clamp(max=self._levels - 1)
        lower, upper = _fourth_power(below / self._levels), _fourth_power((below + 1) / self._levels)
        rises = (noise.to(self.full) + 0.5) * (upper - lower) < (share - lower) * 65536.0
        code = below + rises.to(self.full)
        code = torch.copysign(code, values) if self.signed else torch.where(magnitude > 0, code.clamp(min=1.0), code)
        return code.to(self.dtype), scales


def _fourth_power(place: Tensor) -> Tensor:
    """Sign kept."""
    square = place * place.abs()
    return square * square.abs()


def blocked(moment: Moment) -> tuple[Tensor, ...]:
    """Views [n / 256, 256] of the values and [n / 256, 1] of the scales."""
    values = moment.values.view(-1, BLOCK)
    return (values,) if moment.scales is None else (values, moment.scales.view(-1, 1))


def moment_formats(kind: MomentKind, full: torch.dtype = torch.float32) -> tuple[MomentFormat, MomentFormat]:
    """Formats of the first and the second moment for `train.optimizer.state` and a master dtype."""
    return MomentFormat(kind, True, full), MomentFormat(kind, False, full)
