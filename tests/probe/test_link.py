"""What the link's measurement says where there is nothing to measure with; its figures need a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from muletrain.probe.link import link, registered
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
    found = link(0, Effort(samples=3), 2**26)
    assert found.both.median > 0.9 * max(found.up.median, found.down.median) > 1e9
    assert found.copy_s.median < 1e-3
