"""The exact fp32 master weight in two bytes beside its bf16 working copy.

  bits = the fp32 number as int32,  hi = (bits + 0x8000) >> 16,  low = bits - (hi << 16), a signed 16-bit number

`hi` is the bit pattern of the rounded bf16 copy that the model computes with, so it crosses the link anyway; `low` adds two
bytes a parameter and (hi << 16) + low gives every bit back. The copy equals `.bfloat16()` except at ties, which go away from
zero here: with ties to even, the ties on both sides of an even number would share one pair. A NaN stays a NaN with its sign and
leading payload bits. The largest numbers round to an infinite copy, as in `.bfloat16()`, and still join exactly. Rejected:
splitting by truncation (hi is then rounded towards zero: every weight that the model sees is too small); an fp32 master beside
the copy (two bytes more a way).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK = 1 << 20
_MAGNITUDE, _INFINITY, _QUIET = 0x7FFFFFFF, 0x7F800000, 0x40


class SplitMaster(NamedTuple):
    """The two halves of an fp32 tensor, of its shape."""

    hi: Tensor
    """bfloat16: the working copy."""
    low: Tensor
    """int16: what rounding took away, in units of the fp32 number's last bit."""


def split_bits(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 -> (hi, low), both int16 bit patterns. Pure integer arithmetic, so it fuses into any kernel."""
    bits = master.view(torch.int32)
    nan = (bits & _MAGNITUDE) > _INFINITY
    hi = torch.where(nan, (bits >> 16) | _QUIET, (bits + 0x8000) >> 16)
    low = torch.where(nan, 0, bits - (hi << 16))
    return hi.to(torch.int16), low.to(torch.int16)


def join_bits(hi: Tensor, low: Tensor) -> Tensor:
    """The fp32 numbers of two int16 bit patterns."""
    return ((hi.to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)


def split_master(master: Tensor, out: SplitMaster | None = None) -> SplitMaster:
    """Splits fp32 `master`. With `out` (contiguous, same size) nothing but a few MiB of scratch is allocated."""
    if out is None:
        hi, low = split_bits(master)
        return SplitMaster(hi.view(torch.bfloat16), low)
    parts = (master.view(-1), out.hi.view(-1).view(torch.int16), out.low.view(-1))
    for values, hi_out, low_out in zip(*(torch.split(part, _CHUNK) for part in parts), strict=True):
        hi, low = split_bits(values)
        hi_out.copy_(hi)
        low_out.copy_(low)
    return out


def join_master(hi: Tensor, low: Tensor, out: Tensor | None = None) -> Tensor:
    """The exact fp32 master of the pair, in `out` (contiguous fp32, same size) if given. Beside it only bounded scratch."""
    out = torch.empty(hi.shape, device=hi.device) if out is None else out
    parts = (hi.view(-1).view(torch.int16), low.view(-1), out.view(-1))
    for high, rest, target in zip(*(torch.split(part, _CHUNK) for part in parts), strict=True):
        target.copy_(join_bits(high, rest))
    return out


def as_bits(working: Tensor) -> Tensor:
    """A bf16 tensor's bit patterns, int16; any other as it is."""
    return working.view(torch.int16) if working.dtype == torch.bfloat16 else working


def round_master(master: Tensor, working: Tensor) -> None:
    """Writes the working copy of a master into `working` (`as_bits` of it, of the master's shape).

    A bf16 copy is a split master's `hi`, whatever holds the master, so that strategies have equal bits; other types are rounded
    as PyTorch does. Compiles into the kernel that it is part of; types are viewed outside of it.
    """
    working.copy_(split_bits(master)[0] if working.dtype == torch.int16 else master)
