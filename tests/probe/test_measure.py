"""All measurements together, on this machine's processor; cards that are missing or fail are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from muletrain.probe import measure as room
from muletrain.probe.box import this_box
from muletrain.probe.measure import measure
from muletrain.probe.timing import Effort
from muletrain.spec.errors import DoesNotFitError
from muletrain.spec.machine import Gpu, Machine

SHORT = Effort(sample_s=0.001, samples=2, warm_s=0.001)
CARD = Gpu(name="some card", memory_bytes=2**34, capability=(8, 9), driver="1")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "QUICK", SHORT)


def test_a_box_without_cards_is_measured_and_survives_json(tmp_path: Path) -> None:
    said: list[str] = []
    machine = measure(this_box(""), [tmp_path], quick=True, say=said.append)
    found = machine.measured
    assert found is not None
    assert [rates.device for rates in found.compute] == ["cpu"]
    assert [copy.threads for copy in found.host_copy][-1] == machine.cores
    assert [disk.folder for disk in found.disks] == [str(tmp_path)]
    assert (found.links, found.together, found.peers) == ((), None, ())
    assert found.missing == ("cards, links and peers: no NVIDIA GPU is visible",)
    assert 0 < found.seconds < 15 and found.torch == torch.__version__ and found.taken.endswith("+00:00")
    assert any("disk" in line for line in said)
    assert Machine.from_json(machine.to_json()) == machine


def test_a_card_that_pytorch_cannot_use_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    box = this_box("").model_copy(update={"gpus": (CARD,)})
    found = measure(box, [], quick=True, say=str).measured
    assert found is not None and "cannot use CUDA here" in found.missing[0] and found.disks == ()


def test_cards_of_one_name_are_measured_once_and_what_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of each name; a full card and a refused registration end up in `missing`."""
    measured: list[str] = []

    def full(device: torch.device, name: str, *rest: object) -> None:
        measured.append(f"{name} {device.index}")
        raise torch.OutOfMemoryError

    def refused(*rest: object) -> None:
        raise DoesNotFitError("the driver would not")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(room, "card_rates", full)
    monkeypatch.setattr(room, "links", refused)
    other = CARD.model_copy(update={"name": "another card"})
    box = this_box("").model_copy(update={"gpus": (CARD, other, CARD)})
    found = measure(box, [], quick=True, say=str).measured
    assert sorted(measured) == ["another card 1", "some card 0"]
    assert found is not None and sorted(found.missing) == [
        "another card: its memory is in use by another process; end that and probe again",
        "links and peers: the driver would not",
        "some card: its memory is in use by another process; end that and probe again",
    ]
