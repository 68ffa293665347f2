"""Saves a checkpoint: it is complete and durable, or not there, on all ranks."""

from __future__ import annotations

import base64
import json
import os
import shutil
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.serialization import get_crc32_options, set_crc32_options

from embershard.distributed.checkpoint.blocks import TensorBlocks
from embershard.distributed.checkpoint.chain import prune
from embershard.distributed.checkpoint.digests import DigestingFileSystem, FileEntry, file_entry
from embershard.distributed.checkpoint.folder import PARTIAL, checkpoint_at, leftovers
from embershard.distributed.checkpoint.load import SCALARS, causes
from embershard.distributed.checkpoint.manifest import MANIFEST, Manifest, Parent, SavedLink
from embershard.distributed.checkpoint.rows_file import ChangedShard, write_rows
from embershard.distributed.ranks import Ranks
from embershard.errors import CheckpointError, FailedSaveError, os_problem
from embershard.whole_file import sync_folder


@dataclass(frozen=True, eq=False)
class NewLink:
    """A checkpoint of a chain that is to be written.

    Attributes:
        token: names the save; the same on all ranks.
        parent: the save that a delta follows; None: all tensors are written whole.
        shards: of a delta, this rank's shards with the rows that changed since the parent.
        why_whole: without a parent, for a reader.
    """

    token: str
    parent: Parent | None = None
    shards: tuple[ChangedShard, ...] = ()
    why_whole: str = ""


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: dict[str, Any] | TensorBlocks,
    scalars: Mapping[str, Any],
    ranks: Ranks,
    *,
    keep_last: int,
    run_id: str,
    link: NewLink | None = None,
) -> Path:
    """Write `folder/step_<step>` and return it, then remove the oldest complete checkpoints. Every rank calls it.

    Files and folders are synced before the checkpoint gets its name, and older ones go only after that. One that cannot
    be removed is a warning: the run does not end for it.

    Args:
        folder: shared by all ranks.
        step: steps trained so far.
        tensors: a state dict of tensors and sharded tensors, `without_empty`; or what was made of one.
        scalars: JSON values, the same on every rank.
        ranks: the calling process's place.
        keep_last: complete checkpoints to keep, this one included; at least 1.
        run_id: names the run in the manifest.
        link: of a checkpoint in a chain; of a delta, `tensors` are those that it has whole.

    Raises:
        CheckpointError: a complete checkpoint of this step exists already, or `tensors` holds something else.
        FailedSaveError: on all ranks: a rank could not write. Nothing of this checkpoint is left; earlier ones are as
            they were.

    >>> import torch
    >>> from embershard.distributed import process_group
    >>> with process_group("cpu") as ranks:
    ...     save_checkpoint(Path("run"), 3, {"w": torch.ones(2)}, {"epoch": 0}, ranks, keep_last=1, run_id="8c1f").name
    'step_3'
    """
    final, partial = checkpoint_at(folder, step), checkpoint_at(folder, step, PARTIAL)
    blocks = tensors if isinstance(tensors, TensorBlocks) else TensorBlocks(tensors)
    if any(ranks.all_gather_objects(final.exists())):
        raise CheckpointError(f"{final} exists already. Remove it, or save to another folder (--run-dir).")
    try:
        _write(partial, final, blocks, {**scalars, "step": step}, ranks, run_id, link)
    except OSError as error:
        ranks.from_first(lambda: shutil.rmtree(partial, ignore_errors=True))
        reason = error.strerror or str(error)
        message = f"step {step} could not be saved to {final} ({reason}). Earlier checkpoints are as they were."
        raise FailedSaveError(message) from error
    ranks.from_first(lambda: _prune(folder, step, keep_last))
    return final


def _write(
    partial: Path,
    final: Path,
    blocks: TensorBlocks,
    scalars: Mapping[str, Any],
    ranks: Ranks,
    run_id: str,
    link: NewLink | None,
) -> None:
    ranks.from_first(lambda: _make_empty(partial))
    files = _write_tensors(partial, blocks, ranks)
    saved = None
    if link is not None:
        saved, of_rows = _write_rows(partial, link, blocks, ranks)
        files |= of_rows
    ranks.from_first(lambda: _complete(partial, final, scalars, run_id, files, saved))


def _make_empty(partial: Path) -> None:
    for path in leftovers(partial.parent):
        shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _write_tensors(partial: Path, tensors: TensorBlocks, ranks: Ranks) -> dict[str, FileEntry]:
    """Write and sync the files of all ranks; return their checksums by name. Raises OSError on all ranks."""
    # Without a copy ahead, blocks are read one by one and in order, also where there is a GPU.
    writer = FileSystemWriter(partial, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0)
    writer.fs = files = DigestingFileSystem()
    failures: Mapping[int, BaseException] = {}
    try:
        with _without_crc32():
            dcp.save({}, storage_writer=writer, planner=tensors, process_group=ranks.group)
    except dcp.CheckpointException as error:
        failures = causes(error)
        traceback.clear_frames(error.__traceback__)  # those of torch hold its error, and so the tensors, in a cycle
    own = files.error or failures.get(ranks.rank)
    for rank, found in enumerate(ranks.all_gather_objects(own if isinstance(own, OSError) else None)):
        if found is not None:
            raise OSError(found.errno, f"rank {rank}: {found.strerror or found}")
    for failure in failures.values():
        raise failure
    written = {name: digests.finish() for name, digests in files.digests.items()}
    return {name: entry for part in ranks.all_gather_objects(written) for name, entry in part.items()}


def _write_rows(
    partial: Path, link: NewLink, blocks: TensorBlocks, ranks: Ranks
) -> tuple[SavedLink, dict[str, FileEntry]]:
    """Write the rows of all ranks; return what the manifest has of them. Raises OSError on all ranks."""
    saved, name = SavedLink(link.token, link.parent), f"rows_{ranks.rank}.safetensors"
    if link.parent is None:
        return saved, {}
    own: tuple[Sequence[Any], dict[str, FileEntry]] | Exception = ((), {})
    try:
        if link.shards:
            shards, entry = write_rows(partial / name, link.shards, blocks.before_block)
            own = shards, {name: entry}
    except Exception as error:
        own = error
    everything, files = list[Any](), dict[str, FileEntry]()
    for rank, found in enumerate(ranks.all_gather_objects(own)):
        if isinstance(found, OSError):
            raise OSError(found.errno, f"rank {rank}: {found.strerror or found}")
        if isinstance(found, Exception):
            raise found
        everything += found[0]
        files |= found[1]
    return replace(saved, shards=tuple(everything)), files


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Let torch write tensors without its checksums, which it never verifies: the manifest has SHA-256."""
    computes = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(computes)


def _complete(
    partial: Path,
    final: Path,
    scalars: Mapping[str, Any],
    run_id: str,
    files: Mapping[str, FileEntry],
    link: SavedLink | None,
) -> None:
    _write_synced(partial / SCALARS, json.dumps(scalars, indent=1))
    files = {**files, SCALARS: file_entry(partial / SCALARS)}
    _write_synced(partial / MANIFEST, Manifest.of(scalars["step"], run_id, files, link).text())
    sync_folder(partial)
    os.rename(partial, final)
    sync_folder(final.parent)


def _prune(folder: Path, step: int, keep_last: int) -> None:
    try:
        prune(folder, step, keep_last)
    except OSError as error:
        warnings.warn(
            f"step {step} was saved, but older checkpoints could not be removed: {os_problem(error, folder)} The next "
            "save tries it again.",
            RuntimeWarning,
            stacklevel=2,
        )


def without_empty(tensors: Any) -> Any:
    """Return a state dict without its empty dicts, which torch.distributed.checkpoint cannot find again.

    >>> without_empty({"state": {}, "step": 3})
    {'step': 3}
    """
    if not isinstance(tensors, dict):
        return tensors
    kept = {key: without_empty(value) for key, value in tensors.items()}
    return {key: value for key, value in kept.items() if not (isinstance(value, dict) and not value)}


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def rng_state(device: torch.device) -> dict[str, str]:
    """Return the states of this rank's random number generators, as text for JSON.

    >>> sorted(rng_state(torch.device("cpu")))
    ['cpu']
    """
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: base64.b64encode(bytes(state.tolist())).decode() for name, state in states.items()}


def set_rng_state(saved: Mapping[str, str], device: torch.device) -> None:
    """Restore what `rng_state` returned; without a GPU, its state is skipped.

    >>> cpu = torch.device("cpu")
    >>> saved, number = rng_state(cpu), torch.rand(1)
    >>> set_rng_state(saved, cpu)
    >>> bool(torch.rand(1) == number)
    True
    """
    states = {name: torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8) for name, text in saved.items()}
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
