"""WorkerPlace: which worker a process is and how it finds the others. What a launcher gives and a worker entry takes."""

from __future__ import annotations

from muletrain.spec.value import Value


class WorkerPlace(Value):
    """One worker of a run."""

    rank: int
    workers: int
    local_rank: int
    """Number within its box: which card it takes."""
    local_workers: int
    """Workers on this box: how the box's cores are shared out."""
    rendezvous: str
    """The init_method of torch.distributed: file://... from our own launcher, env:// under torchrun."""
    board: str = ""
    """Folder where the launcher looks for signs of life (spec.sign); empty: nobody looks."""
