"""The ground that ranks work on together: process group, agreements, checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embershard.distributed.process_group import Ranks, process_group  # the function has its module's name
from embershard.lazy_names import lazy_names

if TYPE_CHECKING:
    from embershard.distributed.agreement import longest, shortest
    from embershard.distributed.checkpoint import (
        complete_checkpoints,
        damaged_scalars,
        load_tensors,
        read_scalars,
        rng_state,
        save_checkpoint,
        set_rng_state,
        without_empty,
    )
    from embershard.distributed.config import CheckpointConfig
    from embershard.distributed.empty_batch import empty_like
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "agreement": ["longest", "shortest"],
            "checkpoint": [
                "complete_checkpoints",
                "damaged_scalars",
                "load_tensors",
                "read_scalars",
                "rng_state",
                "save_checkpoint",
                "set_rng_state",
                "without_empty",
            ],
            "config": ["CheckpointConfig"],
            "empty_batch": ["empty_like"],
        },
    )

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
