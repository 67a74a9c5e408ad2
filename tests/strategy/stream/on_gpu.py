"""Several workers on one GPU (a CPU where there is none, to try this out), as a program of its own: what forks must not have
touched the GPU.

    python -m tests.strategy.stream.on_gpu FOLDER WORKERS [dies]

Each worker leaves its losses and norms in FOLDER/curve-RANK.json. With `dies` worker 1 ends in the middle, nobody but the
others looks, and those leave what they were told and how long it took.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from muletrain.spec.errors import WorkerFailedError
from tests.families.tiny import model_plan, tiny_llama
from tests.strategy.runs import Run, advance, curve, start

STREAMING = {"piece": 1024, "inputs": "host", "on_card": (0, 2), "waves": 2}


def worker(rank: int, workers: int, folder: Path, dies: bool) -> None:
    """One worker's whole life."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    if workers > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=workers)
    model = model_plan(folder / "model")
    run = Run(model, "streamed", "bf16", rate=1e-3, steps=12, streaming={**STREAMING, "gradients": "master"})
    strategy = start(run, workers, device)
    found = curve(advance(strategy, run, 0, 6, rank, workers))
    if dies and rank == 1:
        os._exit(9)
    begun = time.monotonic()
    try:
        found += curve(advance(strategy, run, 6, 12, rank, workers))
    except WorkerFailedError as error:
        found = [time.monotonic() - begun, str(error)]  # type: ignore[assignment]
    (folder / f"curve-{rank}.json").write_text(json.dumps(found))
    os._exit(0)


def main() -> None:
    """Starts the workers and waits for them."""
    folder, workers = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    tiny_llama(folder / "model", num_hidden_layers=3)
    fork = multiprocessing.get_context("fork")
    started = [fork.Process(target=worker, args=(rank, workers, folder, "dies" in sys.argv)) for rank in range(workers)]
    for process in started:
        process.start()
    for process in started:
        process.join(60)


if __name__ == "__main__":
    main()
