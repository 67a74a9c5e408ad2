"""Stochastic rounding whose randomness is keyed by what is rounded, never drawn in sequence.

A counter-based generator: the random word of an element is a hash of a 62-bit key and the element's index in its unit. So the
result is the same however a unit is cut into pieces or dealt to workers, in any order and after any resume, and no generator
state is saved. The hash is two rounds of a 32-bit finalizer (multiply and xor-shift, Wellons' lowbias32 constants), in plain
integer tensor arithmetic that a compiler fuses into the kernel that uses it. Products wrap around in 32 bits, as eager PyTorch
and Triton do them; don't compile this for a CPU, where generated C++ may take overflow as impossible. Rejected: torch's
generators (sequential, and another on each device), Philox in tensor arithmetic (ten rounds of 64-bit products for quality that
rounding doesn't need).
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0x7FFFFFFF
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)
_UPPER_HALF = -0x10000


def _mixed(word: Tensor) -> Tensor:
    """One round of the finalizer; int32 products wrap, shifts are made logical by masks."""
    word = (word ^ ((word >> 16) & 0xFFFF)) * _FIRST
    word = (word ^ ((word >> 15) & 0x1FFFF)) * _SECOND
    return word ^ ((word >> 16) & 0xFFFF)


def keyed_bits(key: Tensor, index: Tensor) -> Tensor:
    """32 random bits an element as int32, of `index`'s shape; `key` and `index` are non-negative int64."""
    word = _mixed((index & _WORD).to(torch.int32) ^ (key & _WORD).to(torch.int32))
    return _mixed(word ^ (index >> 31).to(torch.int32) ^ ((key >> 31) & _WORD).to(torch.int32))


def halves(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Two independent uniform numbers in [0, 65536) out of each 32-bit word, int32."""
    return bits & 0xFFFF, (bits >> 16) & 0xFFFF


def stochastic_bfloat16(values: Tensor, noise: Tensor) -> Tensor:
    """fp32 -> bf16: up or down with the odds that make the mean exact; `noise` is uniform in [0, 65536), int32.

    Adding noise to the bits that are cut off carries into the kept ones with just that probability, for either sign. Infinities
    stay; a NaN stays one (its payload might lie in the bits that are cut).
    """
    rounded = ((values.view(torch.int32) + noise) & _UPPER_HALF).view(torch.float32)
    return torch.where(values.isnan(), values, rounded).to(torch.bfloat16)
