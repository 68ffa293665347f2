"""What ranks need to work together: process group, agreements, checkpoints."""

from embershard.distributed.agreement import longest, shortest
from embershard.distributed.checkpoint import (
    CheckpointConfig,
    complete_checkpoints,
    damaged_scalars,
    load_tensors,
    read_scalars,
    rng_state,
    save_checkpoint,
    set_rng_state,
    without_empty,
)
from embershard.distributed.empty_batch import empty_like
from embershard.distributed.process_group import Ranks, process_group

__all__ = [
    "CheckpointConfig",
    "Ranks",
    "complete_checkpoints",
    "damaged_scalars",
    "empty_like",
    "load_tensors",
    "longest",
    "process_group",
    "read_scalars",
    "rng_state",
    "save_checkpoint",
    "set_rng_state",
    "shortest",
    "without_empty",
]
