"""The ground that ranks work on together: process group, agreements, checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embershard.distributed.process_group import Ranks, process_group  # the function has its module's name
from embershard.lazy_names import lazy_names

if TYPE_CHECKING:
    from embershard.distributed.agreement import longest, shortest
    from embershard.distributed.checkpoint import (
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
    from embershard.distributed.config import CheckpointConfig
    from embershard.distributed.empty_batch import empty_like
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "agreement": ["longest", "shortest"],
            "checkpoint": [
                "Manifest",
                "check_disk",
                "complete_checkpoints",
                "damaged_scalars",
                "load_tensors",
                "prune",
                "read_scalars",
                "rng_state",
                "save_checkpoint",
                "set_aside",
                "set_rng_state",
                "step_of",
                "verify_checkpoint",
                "without_empty",
            ],
            "config": ["CheckpointConfig"],
            "empty_batch": ["empty_like"],
        },
    )

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
