"""Space on disk for the checkpoints of a run."""

from __future__ import annotations

from pathlib import Path

from embershard.distributed import Ranks, check_disk
from embershard.sharding.plan import Plan
from embershard.training.config import RunConfig
from embershard.training.fit.machine_limits import disk_of
from embershard.training.fit.memory_needs import RanksHere, memory_needs
from embershard.training.fit.model_size import model_size, table_rows

#: Row, age and score of a cached row.
_CACHED_ROW_BYTES = 16


def check_disk_for_run(config: RunConfig, plan: Plan | None, folder: Path, total_steps: int, ranks: Ranks) -> None:
    """Raise unless all checkpoints of a run of so many steps can be written to `folder`. Collective.

    Raises:
        CheckpointError: with the space that is needed, and that there is.
    """
    num_saves = config.checkpoint.num_saves(total_steps)
    if not num_saves:
        return
    size = model_size(config, table_rows(config))
    save_bytes = size.table_bytes + size.dense_state_bytes  # gradients are not saved, parameters are
    if config.cache.enabled:
        ratio = config.cache.slot_ratio or 1
        slots = round(size.num_rows * ratio) if plan is None else sum(pool.slots for pool in plan.pools)
        save_bytes += slots * _CACHED_ROW_BYTES
    mapped_bytes = _mapped_bytes(config, plan, folder, ranks)
    check_disk(folder, save_bytes, num_saves, config.checkpoint.keep_last, ranks, mapped_bytes)


def _mapped_bytes(config: RunConfig, plan: Plan | None, folder: Path, ranks: Ranks) -> int:
    """Return the bytes that the rows of this machine's ranks will take on the disk of the checkpoints."""
    rows_folder = config.cache.host_dir
    if rows_folder is None or disk_of(Path(rows_folder)) != disk_of(folder):
        return 0
    return memory_needs(config, table_rows(config), RanksHere.of(ranks), plan).disk_bytes
