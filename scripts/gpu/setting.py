"""What all measurements share: real text, model shapes, the planner's own plan for a card of 24 GiB, weights drawn quickly, the
driver's view of memory."""

from __future__ import annotations

import json
import resource
import sysconfig
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from muletrain.data.prepare import prepare
from muletrain.data.stream import TrainingStream
from muletrain.data.tokenizer import train_tokenizer
from muletrain.models.causal import canonical_name
from muletrain.planner.resolve import resolve
from muletrain.probe.box import this_box
from muletrain.probe.compute import matmul
from muletrain.probe.timing import Effort
from muletrain.spec.plan import Plan
from muletrain.spec.recipe import RunConfig

CAP = 24 * 2**30
"""Bytes of a 4090's memory, which the card at hand is held to where a result says so."""
CONTEXT = 5 * 2**27
"""Of them: what the driver and its libraries take beside PyTorch's allocator."""
_SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def _shape(*sizes: int, **fields: Any) -> dict[str, Any]:
    return {**_LLAMA, **dict(zip(_SIZES, sizes, strict=True)), **fields}


SHAPES = {
    "tiny": _shape(64, 4, 128, 4, 4, 8192, head_dim=16),
    "1b": _shape(2048, 16, 8192, 32, 8, 128_256, head_dim=64, rope_theta=500_000.0, tie_word_embeddings=True),
    "2b": _shape(2560, 24, 6912, 20, 20, 32_000),
    "7b": _shape(4096, 30, 11008, 32, 32, 102_400),
    "13b": _shape(5120, 40, 13824, 40, 40, 32_000),
    "32b": _shape(5120, 64, 27648, 40, 8, 152_064),
}


def device_here() -> torch.device:
    """The GPU; a CPU only to try the script out."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait() -> None:
    """Until the GPU is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def matmul_rate(size: int = 8192) -> float:
    """FLOP/s of a square bf16 product, the best of several samples: what it is measured against is not lowered by a moment
    in which the card was throttled."""
    if not torch.cuda.is_available():
        size = 256
    return matmul(device_here(), "bf16", size, size, size, Effort()).flops_s.high


def text_corpus(folder: Path) -> None:
    """`folder`/corpus: the standard library's sources. `folder`/tokenizer: a byte-level BPE trained on them."""
    library = Path(sysconfig.get_path("stdlib"))
    corpus, tokenizer = folder / "corpus", folder / "tokenizer"
    corpus.mkdir()
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).parts
        if parts[0] not in ("test", "site-packages", "idlelib", "dist-packages") and len(list(corpus.iterdir())) < 200:
            (corpus / "_".join(parts)).write_bytes(file.read_bytes())
    train_tokenizer((file.read_text("utf-8", "replace") for file in sorted(corpus.iterdir())), 8192, tokenizer)


def plan_for(
    folder: Path,
    shape: str,
    keys: dict[str, dict[str, Any]],
    *,
    sequence: int = 4096,
    card_bytes: int | None = None,
    workers: int = 1,
) -> Plan:
    """The planner's own plan for this box, its card held to `card_bytes` and taken for as many as there are workers. `keys`:
    {section: {key: value}}."""
    model = folder / shape
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(SHAPES[shape]))
    tree: dict[str, dict[str, Any]] = {
        "model": {"source": str(model), "weights": "random"},
        "data": {
            "source": str(folder / "corpus"),
            "tokenizer": str(folder / "tokenizer"),
            "sequence_length": sequence,
            "cache_dir": str(folder / "cache"),
        },
        "train": {"steps": 1000, "schedule": {"warmup_steps": 10}},
    }
    for section, values in keys.items():
        tree[section] = tree.get(section, {}) | values
    box = this_box()
    if card_bytes:
        gpus = tuple(gpu.model_copy(update={"memory_bytes": card_bytes}) for gpu in box.gpus)
        box = box.model_copy(update={"gpus": gpus * workers})
    tree["parallel"] = {"workers": workers}
    return resolve(RunConfig.model_validate({"run_dir": str(folder / "run"), **tree}), box)


def stream_of(plan: Plan) -> TrainingStream:
    """Packed rows of the plan's text."""
    train, data = plan.train, plan.data
    return TrainingStream(
        prepare(data), sequence_length=data.sequence_length, packing="best_fit", micro_batch=train.micro_batch,
        micro_batches=train.micro_batches, seed=0,
    )  # fmt: skip


class DrawnOnDevice:
    """Random first values, drawn where it is fast: billions drawn on the host would take minutes."""

    def __init__(self, model: Any) -> None:
        self._shapes = {canonical_name(name): p.shape for name, p in model.named_parameters()}
        self.names, self.unexpected = tuple(self._shapes), ()

    def tensor(self, name: str) -> torch.Tensor:
        """Norms are ones, matrices normal with deviation 0.02."""
        shape = self._shapes[name]
        return torch.ones(shape) if len(shape) == 1 else torch.empty(shape, device=device_here()).normal_(0.0, 0.02).cpu()


def cap_memory(card_bytes: int = CAP) -> None:
    """Holds this process to so much of the card, what the driver takes included."""
    if torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((card_bytes - CONTEXT) / whole)


def host_peak_gib() -> float:
    """Of this process, resident, pinned memory included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@dataclass
class DriverMemory:
    """Peak of the card's used memory as the driver sees it, polled while the block runs. For one process on the card."""

    peak_bytes: int = 0

    def __enter__(self) -> DriverMemory:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()
        return self

    def _poll(self) -> None:
        while torch.cuda.is_available() and not self._done.is_set():
            free, whole = torch.cuda.mem_get_info()
            self.peak_bytes = max(self.peak_bytes, whole - free)
            time.sleep(0.02)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()
