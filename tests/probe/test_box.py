"""The box is read from /proc, control groups and nvidia-smi, each faked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muletrain.probe.box import this_box
from muletrain.spec.errors import InputError

GIB = 2**30
TWO = "0, GPU-aa11, NVIDIA GeForce RTX 4090, 24564, 8.9, 560.35.03\n1, GPU-bb22, NVIDIA H200, 143771, 9.0, 560.35.03\n"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Makes an nvidia-smi that answers as told; before that there is none."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def install(text: str, code: int = 0) -> None:
        (tmp_path / "answer").write_text(text)
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n/bin/cat {tmp_path}/answer\nexit {code}\n")
        tool.chmod(0o755)

    return install


def root(tmp_path: Path, cgroup: str = "0::/a/b\n", limits: dict[str, str] | None = None) -> Path:
    files = {"proc/meminfo": "MemTotal:  67108864 kB\nMemFree: 1 kB\n", "proc/cpuinfo": "model name : Some CPU\n"}
    for name, text in (files | {"proc/self/cgroup": cgroup} | (limits or {})).items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    return tmp_path / "root"


@pytest.mark.usefixtures("driver")
def test_O16_no_driver_means_no_gpus(tmp_path: Path) -> None:
    machine = this_box(root=root(tmp_path))
    assert (machine.gpus, machine.cpu, machine.host_memory_bytes) == ((), "Some CPU", 64 * GIB)
    assert machine.cores == len(os.sched_getaffinity(0))


def test_O16_a_failing_driver_is_named(driver: object) -> None:
    driver("Failed to initialize NVML: Driver/library version mismatch\n", 18)  # type: ignore[operator]
    with pytest.raises(
        InputError, match="nvidia-smi failed with code 18: Failed to initialize NVML: Driver/library version mismatch"
    ):
        this_box()


def test_O16_an_old_driver_is_named(driver: object) -> None:
    driver("0, GPU-aa11, NVIDIA GeForce RTX 4090, 24564, [N/A], 470\n")  # type: ignore[operator]
    with pytest.raises(InputError, match="a driver of 2022 or newer is needed"):
        this_box()


def test_a_driver_without_devices(driver: object) -> None:
    driver("No devices were found\n", 6)  # type: ignore[operator]
    assert this_box().gpus == ()


def test_gpus_as_the_driver_names_them(driver: object) -> None:
    driver(TWO)  # type: ignore[operator]
    first, second = this_box().gpus
    assert (first.name, first.memory_bytes, first.capability, first.driver) == (
        "NVIDIA GeForce RTX 4090",
        24564 * 2**20,
        (8, 9),
        "560.35.03",
    )
    assert (second.name, second.capability) == ("NVIDIA H200", (9, 0))


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["4090", "H200"]),
        ("1", ["H200"]),
        ("1,0", ["H200", "4090"]),
        ("GPU-bb", ["H200"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["4090"]),
        ("5", []),
        ("0,7,1", ["4090"]),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices_are_honoured_as_cuda_does(driver: object, visible: str | None, names: list[str]) -> None:
    driver(TWO)  # type: ignore[operator]
    assert [gpu.name.split()[-1] for gpu in this_box(visible).gpus] == names


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("cgroup", "limits", "gib"),
    [
        ("0::/a/b\n", {"sys/fs/cgroup/a/memory.max": f"{8 * GIB}\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, 8),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/memory.max": f"{4 * GIB}\n", "sys/fs/cgroup/a/memory.max": f"{8 * GIB}\n"}, 4),
        ("0::/\n", {"sys/fs/cgroup/memory.max": f"{5 * GIB}\n"}, 5),
        ("9:memory:/d\n0::/\n", {"sys/fs/cgroup/memory/d/memory.limit_in_bytes": f"{6 * GIB}\n"}, 6),
        ("9:memory:/gone\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{7 * GIB}\n"}, 7),
        ("9:cpu,cpuacct:/d\n", {}, 64),
        ("0::/a\n", {"sys/fs/cgroup/a/memory.max": f"{999 * GIB}\n"}, 64),
    ],
)
def test_container_limits_count(tmp_path: Path, cgroup: str, limits: dict[str, str], gib: int) -> None:
    assert this_box(root=root(tmp_path, cgroup, limits)).host_memory_bytes == gib * GIB


def test_the_box_is_read_without_torch() -> None:
    code = "import sys; from muletrain.probe.box import this_box; assert this_box('').cores; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
