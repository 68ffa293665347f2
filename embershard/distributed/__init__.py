"""The ground that ranks work on together: process group, agreements, checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embershard.lazy_names import lazy_names

if TYPE_CHECKING:
    from embershard.distributed.agreement import empty_like, longest, shortest
    from embershard.distributed.checkpoint.blocks import TensorBlocks
    from embershard.distributed.checkpoint.chain import prune
    from embershard.distributed.checkpoint.folder import check_disk, complete_checkpoints, set_aside, step_of
    from embershard.distributed.checkpoint.load import (
        damaged_scalars,
        load_group,
        load_tensors,
        read_scalars,
        saved_sizes,
        saved_tensors,
        verify_checkpoint,
    )
    from embershard.distributed.checkpoint.manifest import Manifest
    from embershard.distributed.checkpoint.save import rng_state, save_checkpoint, set_rng_state, without_empty
    from embershard.distributed.config import CheckpointConfig, PublishConfig
    from embershard.distributed.ranks import Ranks, is_lost_connection, process_group
    from embershard.distributed.supervision import Supervision
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "CheckpointConfig",
    "Manifest",
    "PublishConfig",
    "Ranks",
    "Supervision",
    "TensorBlocks",
    "check_disk",
    "complete_checkpoints",
    "damaged_scalars",
    "empty_like",
    "is_lost_connection",
    "load_group",
    "load_tensors",
    "longest",
    "process_group",
    "prune",
    "read_scalars",
    "rng_state",
    "save_checkpoint",
    "saved_sizes",
    "saved_tensors",
    "set_aside",
    "set_rng_state",
    "shortest",
    "step_of",
    "verify_checkpoint",
    "without_empty",
]
