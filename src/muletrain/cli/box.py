"""This box, as verbs that plan or run need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muletrain.spec.machine import Machine
    from muletrain.spec.recipe import RunConfig


def box_for(request: RunConfig) -> Machine:
    """What is here. A run on the CPU asks no driver, so a driver that is broken cannot stop it. Raises InputError."""
    from muletrain.config.environment import visible_devices
    from muletrain.probe.box import this_box

    return this_box("" if request.parallel.device == "cpu" else visible_devices())
