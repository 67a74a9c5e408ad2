"""One thread for torch (so that forking workers is safe and results do not depend on the machine), no network, and no GPU but
for the tests marked gpu: a process that has used one cannot be forked, and the others are to give the same everywhere."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("-m") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

    import torch

    torch.set_num_threads(1)
