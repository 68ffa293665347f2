"""The ground that ranks work on together: process group, agreements, checkpoints."""

from typing import TYPE_CHECKING

from embershard.lazy_names import lazy_names

if TYPE_CHECKING:
    from embershard.distributed.agreement import empty_like as empty_like
    from embershard.distributed.agreement import longest as longest
    from embershard.distributed.agreement import shortest as shortest
    from embershard.distributed.checkpoint.blocks import TensorBlocks as TensorBlocks
    from embershard.distributed.checkpoint.chain import prune as prune
    from embershard.distributed.checkpoint.folder import check_disk as check_disk
    from embershard.distributed.checkpoint.folder import complete_checkpoints as complete_checkpoints
    from embershard.distributed.checkpoint.folder import set_aside as set_aside
    from embershard.distributed.checkpoint.folder import step_of as step_of
    from embershard.distributed.checkpoint.load import damaged_scalars as damaged_scalars
    from embershard.distributed.checkpoint.load import load_group as load_group
    from embershard.distributed.checkpoint.load import load_tensors as load_tensors
    from embershard.distributed.checkpoint.load import read_scalars as read_scalars
    from embershard.distributed.checkpoint.load import saved_sizes as saved_sizes
    from embershard.distributed.checkpoint.load import saved_tensors as saved_tensors
    from embershard.distributed.checkpoint.load import verify_checkpoint as verify_checkpoint
    from embershard.distributed.checkpoint.manifest import Manifest as Manifest
    from embershard.distributed.checkpoint.save import rng_state as rng_state
    from embershard.distributed.checkpoint.save import save_checkpoint as save_checkpoint
    from embershard.distributed.checkpoint.save import set_rng_state as set_rng_state
    from embershard.distributed.checkpoint.save import without_empty as without_empty
    from embershard.distributed.config import CheckpointConfig as CheckpointConfig
    from embershard.distributed.config import PublishConfig as PublishConfig
    from embershard.distributed.ranks import Ranks as Ranks
    from embershard.distributed.ranks import is_lost_connection as is_lost_connection
    from embershard.distributed.ranks import process_group as process_group
    from embershard.distributed.supervision import Supervision as Supervision
else:
    __getattr__, __all__ = lazy_names(__name__)
