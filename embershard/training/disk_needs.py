"""Space on disk for the checkpoints of a run."""

from __future__ import annotations

from pathlib import Path

from embershard.data import Schema
from embershard.distributed import Ranks, check_disk
from embershard.models.dense_size import DenseSize
from embershard.sharding.plan import Plan
from embershard.sharding.sizes import TableSize
from embershard.training.config import RunConfig
from embershard.training.identity import tables_of

#: Row, age and score of a cached row.
_CACHED_ROW_BYTES = 16


def check_disk_for_run(
    config: RunConfig, schema: Schema, plan: Plan | None, folder: Path, total_steps: int, ranks: Ranks
) -> None:
    """Raise unless all checkpoints of a run of so many steps can be written to `folder`. Collective.

    Raises:
        CheckpointError: with the space that is needed, and that there is.
    """
    num_saves = config.checkpoint.num_saves(total_steps)
    if not num_saves:
        return
    dense = DenseSize.of(config.model, schema.num_dense, len(schema.sparse)).parameter_bytes
    save_bytes = dense * config.dense_optimizer.num_states  # gradients are not saved, parameters are
    for name, (rows, dim) in tables_of(config, schema).items():
        size = TableSize(name, rows, dim, config.model.table_dtype, *config.embedding_optimizer.state_bytes)
        save_bytes += rows * size.row_bytes()
        if config.cache.enabled and plan is None:
            save_bytes += round(rows * (config.cache.slot_ratio or 1)) * _CACHED_ROW_BYTES
    if config.cache.enabled and plan is not None:
        save_bytes += sum(pool.slots for pool in plan.pools) * _CACHED_ROW_BYTES
    check_disk(folder, save_bytes, num_saves, config.checkpoint.keep_last, ranks)
