"""Runs a function on N gloo processes, forked from this one so that torch is imported once.

Forking is safe because tests/conftest.py holds torch to one thread before anything runs: no thread pool exists to be lost.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist


def _child(
    rank: int, workers: int, rendezvous: str, pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    # Makes PyTorch's pool anew after the fork: threads that start together would race for it ("Invalid thread pool").
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=workers, timeout=timedelta(seconds=60)
        )
        result = pickle.dumps(function(rank, workers, *args))
        dist.barrier()
        pipe.send_bytes(b"0" + result)
        dist.destroy_process_group()
    except BaseException:
        pipe.send_bytes(b"1" + traceback.format_exc().encode())
        os._exit(1)
    os._exit(0)


def run_workers(workers: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Calls function(rank, workers, *args) in `workers` processes of one gloo group; returns the results by rank.

    Results must pickle (tensors: use .tolist() or numpy). Raises AssertionError with the first worker's traceback on failure.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(workers):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(rank, workers, f"{folder}/rendezvous", theirs, function, args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, timeout_s)
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()


def _collect(pipes: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < len(pipes):
        pending = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        assert ready, f"workers {[r for r in range(len(pipes)) if r not in results]} gave no answer in {timeout_s} s"
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                message = pipe.recv_bytes()  # type: ignore[union-attr]
            except EOFError:
                raise AssertionError(f"worker {rank} died without a word") from None
            assert message[:1] == b"0", f"worker {rank} failed:\n{message[1:].decode()}"
            results[rank] = pickle.loads(message[1:])
    return [results[rank] for rank in range(len(pipes))]
