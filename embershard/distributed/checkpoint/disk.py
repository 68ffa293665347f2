"""Whether checkpoints can be written: permission and space, before the training and not after it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from embershard.distributed.checkpoint.folder import complete_checkpoints, leftovers
from embershard.errors import CheckpointError, os_problem
from embershard.units import size

if TYPE_CHECKING:  # it loads torch
    from embershard.distributed.ranks import Ranks


def check_disk(
    folder: Path, save_bytes: int, num_saves: int, keep_last: int, ranks: Ranks, mapped_bytes: int = 0
) -> None:
    """Raise unless every rank can write into `folder`, and the checkpoints of a run fit. Every rank calls it.

    Checkpoints that are there already are removed as new ones come, so their bytes count as free. Quotas are not seen.

    Args:
        folder: of the checkpoints; made where it is missing.
        save_bytes: of one checkpoint, all ranks together.
        num_saves: checkpoints that the run writes; `keep_last` + 1 of them are on the disk at one time.
        mapped_bytes: of rows that the run will put on the same disk.

    Raises:
        CheckpointError: on all ranks, with the figures.

    >>> from embershard.distributed import process_group
    >>> with process_group("cpu") as ranks:
    ...     check_disk(Path("run/checkpoints"), save_bytes=1000, num_saves=9, keep_last=2, ranks=ranks)
    """
    problems = ranks.all_gather_objects(_write_problem(folder / f".write_test_{ranks.rank}"))
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise CheckpointError(f"rank {rank} cannot write checkpoints: {problem}")
    ranks.from_first(lambda: _check_space(folder, save_bytes, num_saves, keep_last, mapped_bytes))


def _write_problem(probe: Path) -> str | None:
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        with probe.open("wb") as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
        probe.unlink()
    except OSError as error:
        return os_problem(error, probe)
    return None


def _check_space(folder: Path, save_bytes: int, num_saves: int, keep_last: int, mapped_bytes: int) -> None:
    complete = complete_checkpoints(folder)
    try:
        free = shutil.disk_usage(folder).free - mapped_bytes
        there = sum(folder_bytes(path) for path in [*complete, *leftovers(folder)])
    except OSError as error:
        raise CheckpointError(
            f"{error.filename}: cannot be read ({error.strerror}). Change its permissions, or use another --run-dir."
        ) from error
    at_once = min(num_saves + len(complete), keep_last + 1)
    needed = at_once * save_bytes - there
    if needed > free:
        rows = f" beside {size(mapped_bytes)} of rows in cache.host_dir" if mapped_bytes else ""
        raise CheckpointError(
            f"{folder}: checkpoints need {size(needed)} more, and {size(max(0, free))} are free{rows} ({at_once} "
            f"checkpoints of {size(save_bytes)} at one time, of which {size(there)} are there). Free "
            f"{size(needed - free)}, lower checkpoint.keep_last, or use a --run-dir on a larger disk."
        )


def folder_bytes(folder: Path) -> int:
    """Return the bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
