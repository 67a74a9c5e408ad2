"""The link between host memory and a card, over memory that is mapped and registered as a streamed run's is.

Not over PyTorch's pinned allocator: what a run gets from `cudaHostRegister` on a plain mapping is what a plan must reckon with,
and on a box with a slow page-table set-up the two differ.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from muletrain.probe.timing import Effort, rate, sample, seconds
from muletrain.spec.errors import DoesNotFitError
from muletrain.spec.machine import LinkRates, LinksTogether, PeerRates, Sample
from muletrain.spec.units import format_bytes

SIZE = 2**28
"""Bytes in one copy: a quarter GiB takes 5 ms on the fastest link at hand, so that starting it does not show."""

Route = Literal["peer", "driver", "host"]


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


@dataclass
class _Ways:
    """One card's copies in both directions, each on a stream of its own so that they run together."""

    gpu: int
    pages: Tensor

    def __post_init__(self) -> None:
        half = len(self.pages) // 2
        self._source, self._target = self.pages[:half], self.pages[half:]
        device = torch.device("cuda", self.gpu)
        self._here = [torch.empty(half, dtype=torch.uint8, device=device) for _ in range(2)]
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]

    def start(self, up: bool, down: bool, times: int = 1) -> None:
        """Enqueues copies, without waiting for them."""
        for _ in range(times):
            if up:
                with torch.cuda.stream(self._streams[0]):
                    self._here[0].copy_(self._source, non_blocking=True)
            if down:
                with torch.cuda.stream(self._streams[1]):
                    self._target.copy_(self._here[1], non_blocking=True)

    def wait(self) -> None:
        """Until all are done."""
        for stream in self._streams:
            stream.synchronize()

    def few_s(self, effort: Effort) -> Sample:
        """Seconds of a copy of 64 bytes among many."""
        device = torch.device("cuda", self.gpu)
        return seconds(lambda: self._here[0][:64].copy_(self._source[:64], non_blocking=True), device, effort)


def links(gpus: Sequence[int], effort: Effort, size_bytes: int = SIZE) -> tuple[tuple[LinkRates, ...], LinksTogether | None]:
    """Each card alone, and if there are several all at once."""
    with registered(2 * size_bytes * len(gpus)) as pages:
        cards = [_Ways(gpu, pages[2 * size_bytes * n : 2 * size_bytes * (n + 1)]) for n, gpu in enumerate(gpus)]
        alone = tuple(
            LinkRates(
                gpu=card.gpu,
                up=_bytes_s([card], True, False, size_bytes, effort),
                down=_bytes_s([card], False, True, size_bytes, effort),
                both=_bytes_s([card], True, True, size_bytes, effort),
                copy_s=card.few_s(effort),
            )
            for card in cards
        )
        if len(cards) < 2:
            return alone, None
        up, down, both = (_bytes_s(cards, *ways, size_bytes, effort) for ways in ((True, False), (False, True), (True, True)))
        return alone, LinksTogether(up=up, down=down, both=both)


def link(gpu: int, effort: Effort) -> LinkRates:
    """One card alone."""
    return links([gpu], effort)[0][0]


def _bytes_s(cards: Sequence[_Ways], up: bool, down: bool, size_bytes: int, effort: Effort) -> Sample:
    """By the host's clock: the copies run on several streams, perhaps of several cards."""
    times = 4

    def once() -> float:
        start = time.perf_counter()
        for card in cards:
            card.start(up, down, times)
        for card in cards:
            card.wait()
        return time.perf_counter() - start

    once()
    took = sample([once() for _ in range(effort.samples)])
    return rate(float(len(cards) * times * size_bytes * (up + down)), took)


def peers(gpus: Sequence[int], effort: Effort, size_bytes: int = 2**26) -> tuple[PeerRates, ...]:
    """Each card to each other one, as a copy goes and through registered memory, with the bytes compared."""
    found = []
    with registered(size_bytes) as pages:
        for source, target in ((a, b) for a in gpus for b in gpus if a != b):
            sent = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, device=torch.device("cuda", source))
            direct = torch.cuda.can_device_access_peer(source, target)
            routes: tuple[Route, Route] = ("peer" if direct else "driver", "host")
            for route in routes:
                there = torch.zeros(size_bytes, dtype=torch.uint8, device=torch.device("cuda", target))
                took = _carry(sent, there, pages if route == "host" else None, effort)
                equal = torch.equal(sent.cpu(), there.cpu())
                found.append(PeerRates(source=source, target=target, route=route, bytes_s=rate(size_bytes, took), equal=equal))
    return tuple(found)


def _carry(sent: Tensor, there: Tensor, pages: Tensor | None, effort: Effort) -> Sample:
    """Seconds for all bytes; with `pages` in eight pieces, so that one goes up while the next comes down."""
    down, up = (torch.cuda.Stream(t.device) for t in (sent, there))  # type: ignore[no-untyped-call]

    def once() -> float:
        start = time.perf_counter()
        if pages is None:
            there.copy_(sent, non_blocking=True)
        else:
            for piece, to, target in zip(sent.chunk(8), pages.chunk(8), there.chunk(8), strict=True):
                with torch.cuda.stream(down):
                    to.copy_(piece, non_blocking=True)
                    arrived = down.record_event()
                with torch.cuda.stream(up):
                    up.wait_event(arrived)
                    target.copy_(to, non_blocking=True)
        for device in (sent.device, there.device):
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once()
    return sample([once() for _ in range(effort.samples)])
