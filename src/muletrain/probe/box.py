"""This box as a Machine, without torch and without touching CUDA: workers are forked later, and no CUDA context survives that.

GPUs come from nvidia-smi, which ships with the driver: no binding to install, and its absence means that no GPU is usable.
Host memory is what this process may use: cgroup limits of a container count, in both cgroup versions and at every level above.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

from muletrain.spec.errors import InputError
from muletrain.spec.machine import Gpu, Machine

_QUERY = "index,uuid,name,memory.total,compute_cap,driver_version"
_TIMEOUT_S = 30
_ROOT = Path("/")


def this_box(visible: str | None = None, root: Path = _ROOT) -> Machine:
    """What is here. `visible` is CUDA_VISIBLE_DEVICES (None: all GPUs; "": none, and no driver is asked).

    Raises InputError where the driver fails.
    `root` is where /proc and /sys are looked for.
    """
    return Machine(
        hostname=platform.node(),
        cpu=_cpu_name(root),
        cores=len(os.sched_getaffinity(0)),
        host_memory_bytes=_host_memory(root),
        gpus=() if visible == "" else _visible(_gpus(), visible),
    )


def _cpu_name(root: Path) -> str:
    for line in (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _host_memory(root: Path) -> int:
    total = next(
        int(line.split()[1]) * 1024
        for line in (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("MemTotal:")
    )
    return min([total, *_cgroup_limits(root)])


def _cgroup_limits(root: Path) -> list[int]:
    """Memory limits of this process's control group and all above it."""
    limits = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        inner = Path(group.lstrip("/"))
        for folder in (inner, *inner.parents):
            text = "".join(_lines(base / folder / name)).strip()
            if text.isdecimal():
                limits.append(int(text))
    return limits


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


def _gpus() -> list[tuple[str, str, Gpu]]:
    """(index, uuid, GPU) in the driver's order; empty without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (subprocess.TimeoutExpired, OSError) as error:
        raise InputError(
            f"nvidia-smi gave no answer ({error}); the driver hangs: reboot, or set parallel.device: cpu"
        ) from None
    said = (answer.stdout + answer.stderr).strip()
    if "No devices were found" in said:
        return []
    if answer.returncode:
        raise InputError(
            f"nvidia-smi failed with code {answer.returncode}: {said}\nthe NVIDIA driver is not working: reinstall it or "
            "reboot; to train on the CPU, set parallel.device: cpu"
        )
    return [_gpu(line) for line in answer.stdout.splitlines() if line.strip()]


def _gpu(line: str) -> tuple[str, str, Gpu]:
    fields = [field.strip() for field in line.split(",")]
    try:
        index, uuid, name, mebibytes, capability, driver = fields
        major, _, minor = capability.partition(".")
        gpu = Gpu(name=name, memory_bytes=int(mebibytes) * 2**20, capability=(int(major), int(minor)), driver=driver)
    except ValueError:
        raise InputError(f"nvidia-smi answered {line!r}, which is not {_QUERY}; a driver of 2022 or newer is needed") from None
    return index, uuid, gpu


def _visible(found: list[tuple[str, str, Gpu]], visible: str | None) -> tuple[Gpu, ...]:
    """CUDA's rule: indices or UUID beginnings, in the order given; the first that is none of these ends the list."""
    if visible is None:
        return tuple(gpu for _, _, gpu in found)
    chosen: list[Gpu] = []
    for word in (word.strip() for word in visible.split(",")):
        match = [
            gpu for index, uuid, gpu in found if word and (word == index or (word.startswith("GPU-") and uuid.startswith(word)))
        ]
        if len(match) != 1:
            break
        chosen += match
    return tuple(chosen)
