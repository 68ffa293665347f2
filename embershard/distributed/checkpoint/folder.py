"""The folder of a run's checkpoints: which are complete, and their removal."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from embershard.distributed.checkpoint.best import BestEvaluation
from embershard.errors import CheckpointError, InvalidCheckpointError, os_problem
from embershard.units import size
from embershard.whole_file import sync_folder

if TYPE_CHECKING:  # it loads torch
    from embershard.distributed.ranks import Ranks


_COMPLETE = re.compile(r"step_(\d+)")
PARTIAL = ".tmp"
ASIDE = ".aside"


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first. Their names alone say so: no pointer can be wrong.

    Complete is not valid: `verify_checkpoint` finds damage.

    >>> Path("runs/step_2.tmp").mkdir(parents=True), Path("runs/step_1").mkdir()
    (None, None)
    >>> [checkpoint.name for checkpoint in complete_checkpoints(Path("runs"))]
    ['step_1']
    """
    found = [(step, path) for path in folder.glob("step_*") if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(found)]


def step_of(checkpoint: Path) -> int | None:
    """Return the step in a checkpoint's name, or None for another name.

    >>> step_of(Path("runs/step_20")), step_of(Path("runs/step_20.tmp"))
    (20, None)
    """
    match = _COMPLETE.fullmatch(checkpoint.absolute().name)
    return int(match[1]) if match else None


def checkpoint_at(folder: Path, step: int, ending: str = "") -> Path:
    """Return where the checkpoint of a step is, once it is complete; before, its name has the ending `PARTIAL`.

    >>> checkpoint_at(Path("runs"), 20).name
    'step_20'
    """
    return folder / f"step_{step}{ending}"


def is_plain_name(name: str) -> bool:
    """Return True for a name of a file directly in a folder: no path, and nothing that leads out of it.

    >>> [is_plain_name(name) for name in ("__0_0.distcp", "../x", "/x", "..", "")]
    [True, False, False, False, False]
    """
    return name not in ("", ".", "..") and not {"/", "\0"} & set(name)


def checkpoints_for(folder: Path, step: int | None) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first; with `step`, the one of that.

    Raises:
        CheckpointError: there is none of `step`.

    >>> Path("some/step_2").mkdir(parents=True)
    >>> [path.name for path in checkpoints_for(Path("some"), step=2)]
    ['step_2']
    """
    found = complete_checkpoints(folder)
    candidates = [path for path in found if step in (None, step_of(path))]
    if step is not None and not candidates:
        there = ", ".join(path.name for path in found) or "no complete checkpoint"
        raise CheckpointError(f"{folder}: no checkpoint of step {step}; there is {there}.")
    return candidates


def best_checkpoint(folder: Path) -> tuple[Path | None, str]:
    """Return the complete checkpoint of the best evaluation; where there is none, None and why its file does not lead
    to one, as a sentence without a full stop, empty without such a file.

    >>> Path("gone").mkdir()
    >>> BestEvaluation(200, "auc", 0.782).write(Path("gone"))
    >>> best_checkpoint(Path("gone"))
    (None, 'the checkpoint of the best evaluation (auc 0.782 at step 200) is not in gone')
    """
    try:
        best = BestEvaluation.find(folder)
    except InvalidCheckpointError as error:
        return None, str(error)
    if best is None:
        return None, ""
    if not (path := checkpoint_at(folder, best.step)).is_dir():
        return None, f"the checkpoint of the best evaluation ({best.title}) is not in {folder}"
    return path, ""


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint. If this is interrupted, no part of it has the name of a complete one.

    Of a symbolic link, the link is removed, and what it leads to stays.
    """
    if checkpoint.is_symlink():
        checkpoint.unlink()
        return
    if step_of(checkpoint) is None:
        shutil.rmtree(checkpoint)
        return
    going = checkpoint.with_name(checkpoint.name + PARTIAL)
    shutil.rmtree(going, ignore_errors=True)
    os.rename(checkpoint, going)
    shutil.rmtree(going)


def leftovers(folder: Path) -> list[Path]:
    """Return what a run that died left: checkpoints that were being written or removed.

    >>> Path("dead/step_2.tmp").mkdir(parents=True)
    >>> [path.name for path in leftovers(Path("dead"))]
    ['step_2.tmp']
    """
    return sorted(path for path in folder.glob(f"step_*{PARTIAL}") if path.is_dir())


def set_aside(folder: Path, step: int) -> list[str]:
    """Rename the checkpoints after `step`, from which a run goes on; return their new names. What runs left that died
    is removed: a run that saves no more would keep it. One rank calls it.

    They are invalid, or of a future that the run will not have. It must be able to save under their names.

    >>> for name in ("step_1.tmp", "step_2", "step_3"):
    ...     Path("back", name).mkdir(parents=True)
    >>> set_aside(Path("back"), 2), Path("back/step_1.tmp").exists()
    (['step_3.aside'], False)
    """
    for path in leftovers(folder):
        shutil.rmtree(path, ignore_errors=True)
    names = []
    for path in complete_checkpoints(folder):
        if (step_of(path) or 0) > step:
            new, number = path.with_name(path.name + ASIDE), 1
            while new.exists():
                number += 1
                new = path.with_name(f"{path.name}{ASIDE}{number}")
            os.rename(path, new)
            names.append(new.name)
    if names:
        sync_folder(folder)
    return names


def saves_at_once(keep_last: int, full_every: int = 1, keeps_best: bool = False) -> tuple[int, int]:
    """Return how many whole saves and how many deltas a run has on the disk at most, while it writes one: those that
    are kept, the new one, and what the oldest of them needs; and the best one with what it needs.

    >>> saves_at_once(2), saves_at_once(keep_last=2, full_every=10), saves_at_once(2, 10, keeps_best=True)
    ((3, 0), (2, 10), (3, 19))
    """
    whole = 1 + -(-keep_last // full_every)
    return whole + keeps_best, keep_last + full_every - whole + keeps_best * (full_every - 1)


def check_disk(
    folder: Path,
    save_bytes: int,
    num_saves: int,
    keep_last: int,
    ranks: Ranks,
    mapped_bytes: int = 0,
    full_every: int = 1,
    delta_bytes: int = 0,
    keeps_best: bool = False,
) -> None:
    """Raise unless every rank can write into `folder`, and the checkpoints of a run fit. Every rank calls it.

    Checkpoints that are there already are removed as new ones come, so their bytes count as free. Quotas are not seen.

    Args:
        folder: of the checkpoints; made where it is missing.
        save_bytes: of one checkpoint, all ranks together.
        num_saves: checkpoints that the run writes.
        keep_last: of them, those that stay; see `saves_at_once`.
        mapped_bytes: of rows, and of publications, that the run will put on the same disk.
        full_every: of so many checkpoints, one is whole.
        delta_bytes: of one that is not, without rows: nobody knows before how many of these train.
        keeps_best: that of the best evaluation stays, too.

    Raises:
        CheckpointError: on all ranks, with the figures.

    >>> from embershard.distributed import process_group
    >>> with process_group("cpu") as ranks:
    ...     check_disk(Path("run/checkpoints"), save_bytes=1000, num_saves=9, keep_last=2, ranks=ranks)
    """

    def write_test() -> None:
        probe = folder / f".write_test_{ranks.rank}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with probe.open("wb") as file:
                file.write(b"x")
                file.flush()
                os.fsync(file.fileno())
            probe.unlink()
        except OSError as error:
            raise CheckpointError(f"rank {ranks.rank} cannot write checkpoints: {os_problem(error, probe)}") from error

    ranks.together(write_test, CheckpointError)
    (whole, deltas), fewest = saves_at_once(keep_last, full_every, keeps_best), saves_at_once(1, full_every, keeps_best)
    of_deltas = min(deltas, num_saves) * delta_bytes
    ranks.from_first(lambda: _check_space(folder, save_bytes, num_saves, whole, fewest[0], of_deltas, mapped_bytes))


def _check_space(
    folder: Path,
    save_bytes: int,
    num_saves: int,
    most_whole: int,
    fewest_whole: int,
    delta_bytes: int,
    mapped_bytes: int,
) -> None:
    complete = complete_checkpoints(folder)
    try:
        free = shutil.disk_usage(folder).free - mapped_bytes
        there = sum(folder_bytes(path) for path in [*complete, *leftovers(folder)])
    except OSError as error:
        raise CheckpointError(
            f"{error.filename}: cannot be read ({error.strerror}). Change its permissions, or use another --run-dir."
        ) from error
    at_once = min(num_saves + len(complete), most_whole)
    needed = at_once * save_bytes + delta_bytes - there
    if needed > free:
        fits = needed - max(0, at_once - fewest_whole) * save_bytes <= free
        lower = ", set checkpoint.keep_last = 1" if fits else ""
        rows = f" beside {size(mapped_bytes)} in cache.host_dir and publish.folder" if mapped_bytes else ""
        deltas = f", and {size(delta_bytes)} of others, beside the rows that train" if delta_bytes else ""
        raise CheckpointError(
            f"{folder}: checkpoints need {size(needed)} more, and {size(max(0, free))} are free{rows} ({at_once} "
            f"checkpoints of {size(save_bytes)} at one time{deltas}, of which {size(there)} are there). Free "
            f"{size(needed - free)}{lower}, or use a --run-dir on a larger disk."
        )


def folder_bytes(folder: Path) -> int:
    """Return the bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
