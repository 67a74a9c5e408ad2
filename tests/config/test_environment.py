"""Environment variables are read by value."""

from __future__ import annotations

from pathlib import Path

import pytest

from muletrain.config.environment import cache_dir, limit_spinning, torchrun_place, traceback_wanted, visible_devices
from muletrain.spec.errors import InputError

TORCHRUN = {
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1234",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}


@pytest.mark.parametrize("text", ["0", "false", "no", "off", "", "False"])
def test_H05_a_switch_set_to_off_is_off(text: str) -> None:
    assert traceback_wanted({"MULETRAIN_TRACEBACK": text}) is False


def test_H05_a_switch_is_on_or_absent_or_an_error() -> None:
    assert traceback_wanted({"MULETRAIN_TRACEBACK": "1"}) is True
    assert traceback_wanted({}) is False
    with pytest.raises(InputError, match="environment variable MULETRAIN_TRACEBACK: 'perhaps' is neither on nor off"):
        traceback_wanted({"MULETRAIN_TRACEBACK": "perhaps"})


def test_cache_dir() -> None:
    assert cache_dir({"MULETRAIN_CACHE": "~/x"}) == Path.home() / "x"
    assert cache_dir({"MULETRAIN_CACHE": " "}) == cache_dir({}) == Path.home() / ".cache" / "muletrain"


def test_visible_devices() -> None:
    assert visible_devices({}) is None
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}) == ""


def test_torchrun_place() -> None:
    place = torchrun_place(TORCHRUN)
    assert place is not None
    assert (place.rank, place.workers, place.local_rank, place.local_workers, place.rendezvous) == (3, 4, 1, 2, "env://")
    assert torchrun_place({}) is None
    assert torchrun_place({"WORLD_SIZE": "4"}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"LOCAL_RANK": "", "MASTER_PORT": ""}, "LOCAL_RANK, MASTER_PORT: not set, though RANK and WORLD_SIZE are"),
        ({"RANK": "-1"}, "RANK: '-1' is not a whole number"),
        ({"RANK": "4"}, "a rank must be less than its number of workers"),
        ({"LOCAL_RANK": "2"}, "a rank must be less than its number of workers"),
    ],
)
def test_broken_torchrun_is_named(change: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        torchrun_place(TORCHRUN | change)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"GOMP_SPINCOUNT": "1000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_threads_spin_for_a_bounded_time_unless_the_user_chose(before: dict[str, str], after: dict[str, str]) -> None:
    limit_spinning(before)
    assert before == after
