"""Randomness keyed by what is computed, never by what came before.

A block call draws from a stream seeded by (seed, window, global micro-batch index, layer). So dropout is the same whichever
worker runs a micro-batch, in whatever order blocks are visited, after any resume, and when a block is recomputed. Rejected: one
sequential generator a worker, whose state ties a result to the split and has to be saved.
"""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1
PROLOGUE = -1
"""The layer number of what comes before the first block (embedding dropout)."""


def key(*parts: int) -> int:
    """A 63-bit seed from integers: splitmix64 absorbed part by part (Steele et al. 2014)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


class KeyedRandom:
    """Seeds the default generators before each block. Does nothing for a model without dropout."""

    def __init__(self, seed: int, enabled: bool) -> None:
        self._seed, self._enabled = seed, enabled
        self._window, self._micro_batch = 0, 0

    @property
    def enabled(self) -> bool:
        """The model draws random numbers in training."""
        return self._enabled

    def at(self, window: int, micro_batch: int) -> None:
        """Which micro-batch the next block calls belong to."""
        self._window, self._micro_batch = window, micro_batch

    def enter(self, layer: int) -> None:
        """Called right before a block (or the prologue) computes."""
        if self._enabled:
            torch.manual_seed(key(self._seed, self._window, self._micro_batch, layer))
