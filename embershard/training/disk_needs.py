"""Space on disk for the checkpoints of a run."""

from __future__ import annotations

from pathlib import Path

from embershard.distributed import Ranks, check_disk
from embershard.training.config import RunConfig
from embershard.training.model_size import model_size, table_rows


def check_disk_for_run(config: RunConfig, folder: Path, total_steps: int, ranks: Ranks) -> None:
    """Raise unless all checkpoints of a run of so many steps can be written to `folder`. Collective.

    Raises:
        CheckpointError: with the space that is needed, and that there is.
    """
    num_saves = config.checkpoint.num_saves(total_steps)
    if not num_saves:
        return
    size = model_size(config, table_rows(config))
    save_bytes = size.table_bytes + size.dense_state_bytes  # gradients are not saved, parameters are
    check_disk(folder, save_bytes, num_saves, config.checkpoint.keep_last, ranks)
