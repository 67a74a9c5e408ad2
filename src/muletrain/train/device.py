"""The device a worker computes on, and why a GPU that is there cannot be used: a wrong wheel or an old driver, told apart.

`check_gpu_build` runs before data is prepared and any worker is forked, so it must not start CUDA in this process: it compares
what the wheel was built for with the driver, and where that looks too old lets a process of its own try, since CUDA's forward
compatibility package makes some cards work all the same. What only a worker's own card can say is said by the worker.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import torch

from muletrain.spec.errors import InputError
from muletrain.spec.machine import Gpu
from muletrain.spec.place import WorkerPlace
from muletrain.spec.plan import Plan

_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""By CUDA's major version (CUDA compatibility guide, minor version compatibility): the driver branch it needs at least."""
_TRIAL = "import torch; torch.cuda.init()"


def check_gpu_build(gpus: Sequence[Gpu]) -> None:
    """Raises InputError, naming which, where the installed PyTorch or the driver cannot serve these GPUs. Leaves CUDA alone."""
    if not gpus:
        return
    built_for = torch.version.cuda
    if built_for is None:
        raise InputError(
            f"parallel.device: {gpus[0].name} is here, but the installed PyTorch ({torch.__version__}) is a build without "
            "CUDA. Install one with it (pip install --force-reinstall torch, see pytorch.org), or set parallel.device: cpu"
        )
    needed = _OLDEST_DRIVER.get(int(built_for.partition(".")[0]), 0)
    branch = gpus[0].driver.partition(".")[0]
    if branch.isdecimal() and int(branch) < needed and not _cuda_starts():
        raise InputError(
            f"parallel.device: the NVIDIA driver ({gpus[0].driver}) is too old for the installed PyTorch ({torch.__version__}, "
            f"CUDA {built_for}), which needs {needed} or newer. Update the driver, install a PyTorch built for an older CUDA, "
            "or set parallel.device: cpu"
        )


def _cuda_starts() -> bool:
    return subprocess.run([sys.executable, "-c", _TRIAL], capture_output=True, check=False).returncode == 0


def set_device(plan: Plan, place: WorkerPlace) -> torch.device:
    """Makes the worker's device current and seeds it. Raises InputError where CUDA does not start."""
    if plan.parallel.device == "cpu":
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, min(torch.get_num_threads(), cores // place.local_workers)))
        torch.manual_seed(plan.train.seed)
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank)
    try:
        if not torch.backends.cuda.is_built():
            raise RuntimeError("it is a build without CUDA")
        torch.cuda.set_device(device)
    except RuntimeError as error:
        raise InputError(
            f"parallel.device: worker {place.rank} cannot use GPU {place.local_rank} with PyTorch {torch.__version__} "
            f"(CUDA {torch.version.cuda or 'not built in'}): {str(error).splitlines()[0]}. "
            "Mend that, or set parallel.device: cpu"
        ) from error
    torch.manual_seed(plan.train.seed)
    if plan.memory.gpu_limit:
        share = plan.memory.gpu_limit / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
    return device
