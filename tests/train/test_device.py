"""O16: why a GPU that is there cannot be used is said, with the fix: the wheel, the driver, or the card."""

from __future__ import annotations

import pytest
import torch

from muletrain.spec.errors import InputError
from muletrain.spec.machine import Gpu
from muletrain.spec.place import WorkerPlace
from muletrain.train import device as room
from muletrain.train.device import check_gpu_build, set_device
from tests.train.tiny import make_plan


def _card(driver: str) -> tuple[Gpu, ...]:
    return (Gpu(name="NVIDIA GeForce RTX 4090", memory_bytes=24 * 2**30, capability=(8, 9), driver=driver),)


def test_O16_a_wheel_without_cuda_is_told_apart(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(
        InputError, match=r"RTX 4090 is here, but the installed PyTorch .* is a build without CUDA. Install one"
    ):
        check_gpu_build(_card("580.1"))
    check_gpu_build(())


def test_O16_a_driver_too_old_for_the_wheel_is_told_apart(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(room, "_TRIAL", "raise SystemExit(1)")
    with pytest.raises(
        InputError, match=r"the NVIDIA driver \(550.54.14\) is too old for .*CUDA 13.0\), which needs 580 or newer"
    ):
        check_gpu_build(_card("550.54.14"))
    check_gpu_build(_card("580.65.06"))
    monkeypatch.setattr(room, "_TRIAL", "pass")  # CUDA's forward compatibility package is installed
    check_gpu_build(_card("550.54.14"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine where CUDA does not start")
def test_O16_a_card_that_does_not_start_is_an_input_error_with_its_reason(materials, tmp_path):
    plan = make_plan(materials, tmp_path, device="cuda")
    place = WorkerPlace(rank=0, workers=1, local_rank=0, local_workers=1, rendezvous="")
    with pytest.raises(InputError, match=r"worker 0 cannot use GPU 0 with PyTorch .*Mend that, or set parallel.device: cpu"):
        set_device(plan, place)
