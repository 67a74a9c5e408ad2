"""Sign: what a worker says of itself while it runs, and what the launcher tells a hang by; in files of a private folder.

`sign-<rank>` holds a worker's last sign; `record` worker 0's summary of the session so far, for the launcher to publish should
the worker die without writing one; `stack-<rank>` where a worker stood when it was asked.
"""

from __future__ import annotations

from pathlib import Path

from muletrain.spec.value import Value


class Sign(Value):
    """The last thing a worker did. Every worker shows the same signs in the same order, so a lower `number` is behind."""

    number: int
    doing: str
    limit_s: float = 0.0
    """With no new sign for so long, the worker hangs; 0: this may take as long as it takes."""


def sign_file(board: Path, rank: int) -> Path:
    """A worker's last sign, JSON."""
    return board / f"sign-{rank}"


def stack_file(board: Path, rank: int) -> Path:
    """A worker's Python stacks, empty unless asked for."""
    return board / f"stack-{rank}"


def record_file(board: Path) -> Path:
    """The session's RunRecord so far; gone once worker 0 has written its own."""
    return board / "record"
