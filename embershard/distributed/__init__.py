"""The ground that ranks work on together: process group, agreements, checkpoints."""

from embershard.distributed.agreement import longest, shortest
from embershard.distributed.checkpoint import (
    CheckpointConfig,
    Manifest,
    check_disk,
    complete_checkpoints,
    damaged_scalars,
    load_tensors,
    prune,
    read_scalars,
    rng_state,
    save_checkpoint,
    set_aside,
    set_rng_state,
    step_of,
    verify_checkpoint,
    without_empty,
)
from embershard.distributed.empty_batch import empty_like
from embershard.distributed.process_group import Ranks, process_group

__all__ = [
    "CheckpointConfig",
    "Manifest",
    "Ranks",
    "check_disk",
    "complete_checkpoints",
    "damaged_scalars",
    "empty_like",
    "load_tensors",
    "longest",
    "process_group",
    "prune",
    "read_scalars",
    "rng_state",
    "save_checkpoint",
    "set_aside",
    "set_rng_state",
    "shortest",
    "step_of",
    "verify_checkpoint",
    "without_empty",
]
