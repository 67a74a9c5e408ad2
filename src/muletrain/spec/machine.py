"""Machine: what a box is and, where `mule probe` measured it, what it really does."""

from __future__ import annotations

from typing import Literal

from muletrain.spec.value import Value

SCHEMA_VERSION = 1
Dtype = Literal["bf16", "fp16", "fp32", "tf32", "fp64"]


class Gpu(Value):
    """One card as the driver names it."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    """CUDA compute capability, e.g. (8, 9)."""
    driver: str


class Sample(Value):
    """A value measured several times."""

    median: float
    low: float
    high: float
    n: int

    @property
    def spread(self) -> float:
        """(highest - lowest) / median."""
        return (self.high - self.low) / self.median if self.median else 0.0


class MatmulRate(Value):
    """A product of m x k and k x n."""

    dtype: Dtype
    m: int
    k: int
    n: int
    flops_s: Sample
    """2 m k n over its time."""


class SustainedRate(Value):
    """The product that stands for a card's best rate, repeated for about a second with pauses."""

    busy: float
    """Share of the time with work; 1: no pauses."""
    flops_s: Sample
    """While it works, after the card has settled."""


class AttentionRate(Value):
    """Causal attention of `rows` sequences, with the kernel that training uses."""

    dtype: Dtype
    rows: int
    sequence: int
    heads: int
    kv_heads: int
    head_dim: int
    forward_flops_s: Sample
    """Over 2 x rows x sequence^2 x heads x head_dim: both products, the causal half."""
    backward_flops_s: Sample
    """Over 2.5 times that: five products for two, the scores' recomputation included."""


class ComputeRates(Value):
    """What one kind of card, or the processor, computes."""

    device: str
    """The card's name as the driver gives it; "cpu" for the processor."""
    matmuls: tuple[MatmulRate, ...]
    attention: tuple[AttentionRate, ...]
    sustained: tuple[SustainedRate, ...]
    """What power leaves of the products' rates, which are measured with pauses. Empty: the processor."""
    memory_bytes_s: Sample
    """Own memory, read and written by a pass over one large array into another."""
    kernel_s: Sample
    """The least time from one operation to the next, of many tiny ones in a row."""


class LinkRates(Value):
    """Between host memory that is registered with the driver and one card, bytes a second."""

    gpu: int
    """Place in Machine.gpus."""
    up: Sample
    """Host to card, alone."""
    down: Sample
    """Card to host, alone."""
    both: Sample
    """Both directions together, both busy."""
    copy_s: Sample
    """A copy of a few bytes: what starting one costs."""


class LinksTogether(Value):
    """All cards at the same time, summed: what host memory and shared bridges let through."""

    up: Sample
    down: Sample
    both: Sample

    @property
    def rates(self) -> tuple[Sample, Sample, Sample]:
        """Up, down, both."""
        return self.up, self.down, self.both


class PeerRates(Value):
    """From one card to another."""

    source: int
    target: int
    route: Literal["peer", "driver", "host"]
    """peer: one card writes the other's memory. driver: it may not, and the driver copies through memory of its own. host: down
    to registered host memory and up again, piece by piece."""
    bytes_s: Sample
    equal: bool
    """All bytes arrived as they were sent."""


class HostCopy(Value):
    """Host memory to host memory."""

    threads: int
    bytes_s: Sample
    """Bytes copied; each is read once and written once."""


class DiskRates(Value):
    """Files of one folder, bytes a second, as a checkpoint or a token store sees them."""

    folder: str
    write_bytes_s: Sample
    """Until the device says that it has them (fsync)."""
    read_bytes_s: Sample
    """After the kernel was asked to forget them."""


class Measured(Value):
    """What a box really does."""

    taken: str
    """UTC, ISO 8601."""
    torch: str
    """PyTorch's version, with CUDA's."""
    seconds: float
    """How long measuring took."""
    compute: tuple[ComputeRates, ...]
    """One for each kind of card, and the processor's."""
    links: tuple[LinkRates, ...]
    together: LinksTogether | None
    """None: fewer than two cards."""
    peers: tuple[PeerRates, ...]
    host_copy: tuple[HostCopy, ...]
    disks: tuple[DiskRates, ...]
    missing: tuple[str, ...]
    """What was not measured, and why."""


class Machine(Value):
    """One box. Sizes are what the box has; a recipe's limits are applied by the planner."""

    schema_version: int = SCHEMA_VERSION
    hostname: str
    cpu: str
    cores: int
    """Cores this process may run on."""
    host_memory_bytes: int
    """Usable host memory: the smaller of physical memory and the container's limit."""
    gpus: tuple[Gpu, ...] = ()
    measured: Measured | None = None
    """By `mule probe`; None: nothing was measured, and plans use the catalogue's rates."""
