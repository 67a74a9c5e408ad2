"""Several workers on one GPU: streams that wait for each other across processes give one worker's numbers, and are released
when a worker dies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.strategy.runs import worst

pytestmark = pytest.mark.gpu


def on_gpu(folder: Path, workers: int, *words: str) -> list[Any]:
    """What each worker left; None where it left nothing."""
    folder.mkdir()
    line = [sys.executable, "-m", "tests.strategy.stream.on_gpu", str(folder), str(workers), *words]
    subprocess.run(line, check=True, timeout=180)
    files = [folder / f"curve-{rank}.json" for rank in range(workers)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def test_three_workers_on_one_gpu_have_one_workers_numbers(tmp_path: Path) -> None:
    [alone] = on_gpu(tmp_path / "one", 1)
    together = on_gpu(tmp_path / "three", 3)
    assert len(alone) == 12 and together[0] == together[1] == together[2]
    assert worst(together[0], alone) < 5e-3


def test_a_stream_that_waits_for_a_dead_worker_is_released(tmp_path: Path) -> None:
    first, dead, last = on_gpu(tmp_path / "dies", 3, "dies")
    assert dead is None
    for seconds, message in (first, last):
        assert seconds < 10 and message == "worker 1 of 3 ended in the middle of a step; so did the others"
