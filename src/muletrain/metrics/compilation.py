"""Seconds that torch.compile has spent in this process. A new shape compiles in the middle of a run: that is no training time.

The compiler keeps this count itself. Rejected: leaving out slow steps by a rule of thumb, which hides what is really slow.
"""

from __future__ import annotations

import sys


def compile_seconds() -> float:
    """Wall time of all compilations so far, forward and backward; 0 if nothing was ever compiled."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # not imported here: that takes seconds, and means that nothing compiles
    return float(dynamo.calculate_time_spent()["total_wall_time"]) if dynamo else 0.0
