"""The disk space that bases take. Deltas are as large as what is trained, which nobody knows before."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from embershard.distributed import Ranks
from embershard.distributed.publish.published import published
from embershard.errors import ConfigError, os_problem
from embershard.training.config import RunConfig
from embershard.training.fit.machine_limits import nearest_folder
from embershard.training.fit.model_size import model_size, table_rows
from embershard.units import size


def check_disk_for_bases(config: RunConfig, folder: Path, ranks: Ranks) -> None:
    """Raise unless the bases of a run can be written to a folder. Collective.

    Raises:
        ConfigError: on all ranks, with the figures.
    """

    def check() -> None:
        try:
            needed, free = bytes_of_bases(config, folder), shutil.disk_usage(nearest_folder(folder)).free
        except OSError as error:
            raise ConfigError(f"publish.folder: {os_problem(error)}; choose another folder.") from error
        if needed > free:
            changes = {"publish.dtype = fp16": replace(config.publish, dtype="fp16")}
            if config.publish.base_every is not None:
                changes["publish.keep_bases = 1"] = replace(config.publish, keep_bases=1)
            sizes = {text: bytes_of_bases(replace(config, publish=each), folder) for text, each in changes.items()}
            fitting = [text for text, num_bytes in sizes.items() if num_bytes <= free]
            also = f", or set {' or '.join(fitting)}" if fitting else ""
            raise ConfigError(
                f"publish.folder: {folder} needs {size(needed)} more for bases, beside deltas, and {size(free)} are "
                f"free. Free some, choose a folder on a larger disk{also}."
            )

    ranks.from_first(check)


def bytes_of_bases(config: RunConfig, folder: Path) -> int:
    """Return how many bytes more than those in the folder bases, and the checkpoint that the first one is made of, take
    at one time; below 0 where there are more."""
    model, publish = model_size(config, table_rows(config)), config.publish
    number_bytes = 2 if publish.dtype == "fp16" else 4
    base = number_bytes * sum(table.rows * table.dim for table in model.tables) + model.dense_parameter_bytes
    count = 1 if publish.base_every is None else publish.keep_bases + 1
    files = (path for _, found in published(folder, "base") for path in found.rglob("*"))
    there = sum(path.stat().st_size for path in files if path.is_file())
    return max(count * base, base + model.table_bytes + model.dense_state_bytes) - there
