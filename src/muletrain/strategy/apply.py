"""THE ordered list: how a model on the meta device becomes a running strategy. Every strategy goes through these lines.

1. randomness   keyed by (seed, window, micro-batch, layer); only for models that draw any
2. blocks       what each keeps for backward, compiled or not; before sharding, so that FSDP's hooks stay outside
3. memory       the strategy places parameters, loads or draws weights, makes optimizer state
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from muletrain.metrics.communication import CommunicationMeter
from muletrain.models.causal import CausalModel
from muletrain.models.weights import WeightSource
from muletrain.precision.policy import precision_of
from muletrain.precision.scaler import LossScaler
from muletrain.spec.plan import Plan
from muletrain.strategy.activations import keeping, prepare_block, seed_before
from muletrain.strategy.contract import Strategy
from muletrain.strategy.materials import Materials
from muletrain.strategy.randomness import KeyedRandom
from muletrain.strategy.resident import ResidentStrategy
from muletrain.strategy.shard import ShardedStrategy
from muletrain.strategy.stream.setup import Blocks
from muletrain.strategy.stream.strategy import StreamedStrategy
from muletrain.strategy.update import Updater


def build_strategy(plan: Plan, model: CausalModel, weights: WeightSource, device: torch.device) -> Strategy:
    """Places `model` (on the meta device, any dtype) as the plan says. Collective.

    A process group exists if there are several workers, and always for zero1, zero2 and zero3.
    """
    ready = dist.is_initialized()
    worker, workers = (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)
    precision = precision_of(plan.precision.compute)
    meter = CommunicationMeter()
    random = KeyedRandom(plan.train.seed, model.has_dropout)
    scaler = LossScaler(plan.precision.compute == "fp16", plan.precision.initial_loss_scale, plan.tokens_per_step)
    streamed = plan.memory.strategy == "streamed"
    updater = Updater(plan.train.optimizer, plan.train.clip_norm, scaler, precision.master, workers, meter, on_host=streamed)
    materials = Materials(model, weights, device, precision, random, updater, meter, worker, workers)
    prepare = partial(
        prepare_block, activations=plan.memory.activations, compiled=plan.train.compile, preserve_random=random.enabled
    )
    if streamed:  # blocks run in slots there, so those are prepared
        mine = -(-plan.train.micro_batches // workers)
        wave = -(-mine // plan.memory.streaming.waves)
        keep = partial(keeping, compiled=plan.train.compile)
        return StreamedStrategy(materials, Blocks(prepare, keep), plan.memory.streaming, plan.train.seed, wave)
    for layer, block in enumerate(model.layers):
        prepare(block)
        seed_before(block, layer, random)
    if plan.memory.strategy == "resident":
        return ResidentStrategy(materials)
    return ShardedStrategy(materials, plan.memory.strategy)
