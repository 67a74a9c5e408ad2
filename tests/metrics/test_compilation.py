"""Compile time is the compiler's own count."""

from __future__ import annotations

import time

import torch

from muletrain.metrics.compilation import compile_seconds


def test_only_compiling_is_counted():
    function = torch.compile(lambda x: x * 2 + 1, backend="eager", dynamic=False)
    before, start = compile_seconds(), time.perf_counter()
    function(torch.ones(3))
    first = compile_seconds() - before
    assert 0 < first <= time.perf_counter() - start
    function(torch.ones(3))
    assert compile_seconds() - before == first, "a second call of the same shape compiles nothing"
    function(torch.ones(5))
    assert compile_seconds() - before > first, "a new shape does"
