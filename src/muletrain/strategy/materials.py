"""What every strategy is made of, so that their constructors differ only where they do."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from muletrain.metrics.communication import CommunicationMeter
from muletrain.models.causal import CausalModel
from muletrain.models.weights import WeightSource
from muletrain.precision.policy import Precision
from muletrain.strategy.randomness import KeyedRandom
from muletrain.strategy.update import Updater


@dataclass(frozen=True)
class Materials:
    """`model` is on the meta device, in any dtype; the rest is this worker's."""

    model: CausalModel
    weights: WeightSource
    device: torch.device
    precision: Precision
    random: KeyedRandom
    updater: Updater
    meter: CommunicationMeter
    worker: int
    workers: int
