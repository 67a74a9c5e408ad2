"""What the link's measurement says where there is nothing to measure with; its figures need a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from muletrain.probe.link import link, peers, registered
from muletrain.probe.timing import Effort
from muletrain.spec.errors import DoesNotFitError


def test_a_refused_registration_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(cudaHostRegister=lambda address, size, flags: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(DoesNotFitError, match=r"would not register .*KiB.*error 2.*ulimit -l"), registered(4096):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_both_ways_move_at_least_what_one_way_does() -> None:
    found = link(0, Effort(samples=3))
    assert found.both.median > 0.9 * max(found.up.median, found.down.median) > 1e9
    assert found.copy_s.median < 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_bytes_arrive_by_every_route() -> None:
    found = peers([0, 1], Effort(samples=3))
    assert {(rates.source, rates.target) for rates in found} == {(0, 1), (1, 0)}
    assert all(rates.equal for rates in found)
