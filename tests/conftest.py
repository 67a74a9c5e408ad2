"""One thread for torch (so that forking workers is safe and results do not depend on the machine), and no network."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: object) -> None:
    import torch

    torch.set_num_threads(1)
