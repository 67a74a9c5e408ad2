"""muletrain: train large language models on the GPUs that people can actually get.

Rooms import downwards only: cli > bench | train, serve > launch, planner | checkpoint > config, catalog | strategy >
models, data, optim, probe > precision, metrics > spec. docs/ARCHITECTURE.md says where a change goes.
"""

__version__ = "0.1.0"
