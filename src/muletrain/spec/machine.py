"""Machine: what a box is and, where `mule probe` measured it, what it really does."""

from __future__ import annotations

from muletrain.spec.value import Value


class Gpu(Value):
    """One card as the driver names it."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    """CUDA compute capability, e.g. (8, 9)."""
    driver: str


class Machine(Value):
    """One box. Sizes are what the box has; a recipe's limits are applied by the planner."""

    hostname: str
    cpu: str
    cores: int
    """Cores this process may run on."""
    host_memory_bytes: int
    """Usable host memory: the smaller of physical memory and the container's limit."""
    gpus: tuple[Gpu, ...] = ()
