"""The order of rows: a keyed permutation of [0, n) that gives any position in constant time and memory.

A Feistel network over the smallest even number of bits that holds n, with cycle walking for values outside: a bijection by
construction, whatever the round function. Resume at any position is a look-up, on any number of workers, and no generator state
is saved. Rejected: numpy's Generator.permutation (memory of n, and its stream may change between versions).
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

IntArray = np.ndarray[Any, np.dtype[np.int64]]
_ROUNDS = 6


class KeyedOrder:
    """A permutation of [0, n) chosen by a key of integers (and a word for the purpose). Equal keys, equal order; n >= 0."""

    def __init__(self, n: int, purpose: str, *key: int) -> None:
        self.n = n
        # At least 6 bits: with fewer, a Feistel network reaches only some of the permutations.
        self._half_bits = max(3, (max(n - 1, 1).bit_length() + 1) // 2)
        digest = hashlib.blake2b(f"{purpose}|{'|'.join(map(str, key))}".encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8")

    def __call__(self, positions: IntArray) -> IntArray:
        """What stands at the positions. int64 of any length in, the same shape out; raises IndexError outside [0, n)."""
        values = np.asarray(positions, dtype=np.int64)
        if values.size and (values.min() < 0 or values.max() >= self.n):
            raise IndexError(f"position outside [0, {self.n})")
        out = self._scramble(values.astype(np.uint64))
        # Cycle walking: the domain is at most 4 n (64 for small n), so a few rounds on ever fewer values.
        outside = np.flatnonzero(out >= self.n)
        while outside.size:
            out[outside] = self._scramble(out[outside])
            outside = outside[out[outside] >= self.n]
        return out.astype(np.int64)

    def _scramble(self, values: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        bits, mask = np.uint64(self._half_bits), np.uint64((1 << self._half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return (left << bits) | right


def _mix(value: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): every input bit moves every output bit."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
