"""The link between host memory and a card, over memory that is mapped and registered as a streamed run's is.

Not over PyTorch's pinned allocator: what a run gets from `cudaHostRegister` on a plain mapping is what a plan must reckon with,
and on a box with a slow page-table set-up the two differ.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from muletrain.probe.timing import Effort, rate, seconds
from muletrain.spec.errors import DoesNotFitError
from muletrain.spec.machine import LinkRates
from muletrain.spec.units import format_bytes

SIZE = 2**28
"""Bytes in one copy: a quarter GiB takes 5 ms on the fastest link at hand, so that starting it does not show."""


@contextmanager
def registered(size_bytes: int) -> Iterator[Tensor]:
    """Host bytes that the driver copies from and to directly. Raises DoesNotFitError where it refuses."""
    pages = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8).fill_(1)
    code = int(torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), size_bytes, 0))
    if code != 0:
        raise DoesNotFitError(
            f"mule probe: the driver would not register {format_bytes(size_bytes)} of host memory (error {code}); a container "
            "may limit locked memory: raise `ulimit -l`"
        )
    try:
        yield pages
    finally:
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(pages.data_ptr())


def link(gpu: int, effort: Effort, size_bytes: int = SIZE) -> LinkRates:
    """Up, down and both at once."""
    device = torch.device("cuda", gpu)
    with torch.cuda.device(device), registered(2 * size_bytes) as pages:
        source, target = pages[:size_bytes], pages[size_bytes:]
        here = [torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

        def up() -> None:
            here[0].copy_(source, non_blocking=True)

        def down() -> None:
            target.copy_(here[1], non_blocking=True)

        def both() -> None:
            aside.wait_stream(torch.cuda.current_stream())
            for _ in range(4):
                up()
                with torch.cuda.stream(aside):
                    down()
            torch.cuda.current_stream().wait_stream(aside)

        few = seconds(lambda: here[0][:64].copy_(source[:64], non_blocking=True), device, effort)
        return LinkRates(
            gpu=gpu,
            up=rate(size_bytes, seconds(up, device, effort)),
            down=rate(size_bytes, seconds(down, device, effort)),
            both=rate(8 * size_bytes, seconds(both, device, effort)),
            copy_s=few,
        )
