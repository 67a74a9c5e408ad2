"""Everything `mule probe` measures, into one Machine. What is not there or fails is named in `missing`, never just skipped.

Cards of one name compute alike and are measured once; each card's link is measured, since slots differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from muletrain.probe.compute import card_rates, processor_rates
from muletrain.probe.host import disk, distinct, host_copy
from muletrain.probe.link import links, peers
from muletrain.probe.timing import Effort
from muletrain.spec.errors import DoesNotFitError, InputError
from muletrain.spec.machine import ComputeRates, DiskRates, LinkRates, LinksTogether, Machine, Measured, PeerRates

FULL, QUICK = Effort(), Effort(sample_s=0.01, samples=5, warm_s=0.02)


def measure(machine: Machine, folders: Sequence[Path], *, quick: bool, say: Callable[[str], None]) -> Machine:
    """`machine`, which is this box, with what it does. `folders`: whose disks to measure. `say` is told what comes next."""
    start, effort = time.perf_counter(), QUICK if quick else FULL
    missing: list[str] = []
    gpus = _usable(machine, missing)
    compute: list[ComputeRates] = []
    for name, gpu in {machine.gpus[gpu].name: gpu for gpu in reversed(gpus)}.items():
        say(f"{name}: products, attention, memory")
        compute += _card(gpu, name, quick, effort, missing)
    say("processor, host memory")
    compute.append(processor_rates(quick, effort))
    copies = host_copy(machine.cores, 2**26 if quick else 2**28, effort)
    alone, together, between = _links(gpus, effort, say, missing)
    disks: list[DiskRates] = []
    for folder in distinct(folders):
        say(f"disk of {folder}")
        disks += _disk(folder, quick, missing)
    measured = Measured(
        taken=datetime.now(UTC).isoformat(timespec="seconds"),
        torch=str(torch.__version__),
        seconds=time.perf_counter() - start,
        compute=tuple(compute),
        links=alone,
        together=together,
        peers=between,
        host_copy=copies,
        disks=tuple(disks),
        missing=tuple(missing),
    )
    return machine.model_copy(update={"measured": measured})


def _usable(machine: Machine, missing: list[str]) -> list[int]:
    """Cards that PyTorch can use."""
    if not machine.gpus:
        missing.append("cards, links and peers: no NVIDIA GPU is visible")
        return []
    if not torch.cuda.is_available():
        missing.append(f"cards, links and peers: this PyTorch ({torch.__version__}) cannot use CUDA here")
        return []
    gpus = list(range(min(len(machine.gpus), torch.cuda.device_count())))
    if len(gpus) == 1:
        missing.append("card to card: there is one card")
    return gpus


def _card(gpu: int, name: str, quick: bool, effort: Effort, missing: list[str]) -> list[ComputeRates]:
    try:
        return [card_rates(torch.device("cuda", gpu), name, quick, effort)]
    except torch.OutOfMemoryError:
        missing.append(f"{name}: its memory is in use by another process; end that and probe again")
        return []


def _links(
    gpus: Sequence[int], effort: Effort, say: Callable[[str], None], missing: list[str]
) -> tuple[tuple[LinkRates, ...], LinksTogether | None, tuple[PeerRates, ...]]:
    if not gpus:
        return (), None, ()
    say("links")
    try:
        alone, together = links(gpus, effort)
        return alone, together, peers(gpus, effort) if len(gpus) > 1 else ()
    except (DoesNotFitError, torch.OutOfMemoryError) as error:
        missing.append(f"links and peers: {error}")
        return (), None, ()


def _disk(folder: Path, quick: bool, missing: list[str]) -> list[DiskRates]:
    try:
        first = disk(folder, 2**26, 1)
        if quick or first.write_bytes_s.median < 2**28:  # a slow disk has shown all that a larger file would
            return [first]
        return [disk(folder, 2**29, 3)]
    except InputError as error:
        missing.append(f"disk: {error}")
        return []
