"""Peak memory of one worker, as the system counts it.

A CPU worker: the process's peak resident set (VmHWM), which a forked worker inherits pages into, as it really holds them.
A GPU worker: what PyTorch's allocator reserved at most, because that is what the card had to give.
"""

from __future__ import annotations

import resource
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_process_bytes() -> int:
    """Peak resident memory of this process. A forked worker starts its own count."""
    if _STATUS.exists():
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_memory_bytes(device_type: str) -> int:
    """Peak so far of this worker: reserved card memory for "cuda", resident process memory otherwise."""
    if device_type == "cuda":
        import torch  # noqa: PLC0415 - only a GPU worker needs it here, and it has it

        return int(torch.cuda.max_memory_reserved())
    return peak_process_bytes()
