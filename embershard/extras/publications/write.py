"""Writes publications: complete and durable, or not there, on all ranks. And removes old ones."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from embershard.distributed.changed_rows import BehindRows, TouchedRows
from embershard.distributed.publish.published import (
    DENSE,
    MANIFEST,
    DamagedError,
    Publication,
    PublicationError,
    RowsInFile,
    published,
    read_files,
    read_publication,
)
from embershard.distributed.ranks import Ranks
from embershard.distributed.tensors_file import safetensors
from embershard.whole_file import sync_folder

PARTIAL = ".partial"
_LOCK = ".lock"
_NO_STATE = (
    "{}: the state of the checkpoint is in no publication: it could not be written, as on a full disk, or was removed"
)
Files = dict[str, tuple[int, str]]


def next_delta(have: Publication, life: int, token: str, step: int) -> Publication:
    """Return the delta of `step` that follows `have`, without its files."""
    return replace(
        have, kind="delta", seq=have.seq + 1, life=life, token=token, step=step, parent=have.link, state="",
        files={}, parts=(),
    )  # fmt: skip


def write_delta(
    folder: Path, delta: Publication, touched: Sequence[TouchedRows], dense: dict[str, Tensor], ranks: Ranks
) -> Publication:
    """Write a delta, and return it with its files. Every rank calls it, with its rows.

    Args:
        delta: without files.
        dense: weights around the tables, by name; those of the first rank are written.

    Raises:
        OSError: on all ranks: a rank could not write. Nothing of the delta is left.
    """
    partial = folder / f"{delta.name}{PARTIAL}"
    ranks.from_first(lambda: _make_empty(partial))
    try:
        own: OSError | tuple[list[RowsInFile], Files]
        try:
            own = _write_own(partial, ranks.rank, touched, dense if ranks.is_first else None)
        except OSError as error:
            own = error
        parts, files = list[RowsInFile](), Files()
        for rank, found in enumerate(ranks.all_gather_objects(own)):
            if isinstance(found, OSError):
                raise OSError(found.errno, f"rank {rank}: {found.strerror or found}", found.filename)
            parts += found[0]
            files |= found[1]
        complete = replace(delta, parts=tuple(parts), files=files)
        ranks.from_first(lambda: finish(partial, folder / delta.name, complete))
    except OSError:
        ranks.from_first(lambda: shutil.rmtree(partial, ignore_errors=True))
        raise
    return complete


def _make_empty(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _write_own(
    partial: Path, rank: int, touched: Sequence[TouchedRows], dense: dict[str, Tensor] | None
) -> tuple[list[RowsInFile], Files]:
    name, parts, tensors = f"rows_{rank}.safetensors", list[RowsInFile](), dict[str, Tensor]()
    for number, found in enumerate(touched):
        place = str(number)
        live = None if found.changed is None else found.changed.live
        size = (found.first_column, found.rows.shape[1], len(found.keys), live)
        parts.append(RowsInFile(name, place, found.table, *size))
        tensors |= {f"{place}.keys": found.keys, f"{place}.rows": found.rows}
        if (ids := found.changed) is not None:
            tensors |= {f"{place}.changed": ids.rows, f"{place}.old": ids.old, f"{place}.new": ids.new}
    files = {name: _write_tensors(partial / name, tensors)}
    if dense is not None:
        files[DENSE] = _write_tensors(partial / DENSE, dense)
    return parts, files


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> tuple[int, str]:
    digest, num_bytes = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in safetensors(tensors):
            file.write(piece)
            digest.update(piece)
            num_bytes += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return num_bytes, digest.hexdigest()


def finish(partial: Path, final: Path, publication: Publication) -> None:
    """Write the manifest into a folder, make all of it durable, and give it its name, which nothing has yet."""
    with (partial / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(publication.text())
        file.flush()
        os.fsync(file.fileno())
    for folder in {path.parent for path in partial.rglob("*")}:
        sync_folder(folder)
    os.rename(partial, final)  # fails where a folder with files has that name
    with suppress(OSError):  # replicas see it: what follows must follow it
        sync_folder(final.parent)


def sync_files(folder: Path) -> None:
    """Make the contents of all files in a folder durable."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def newest(folder: Path) -> Publication | None:
    """Return the publication with the newest state; None for an empty folder.

    Raises:
        DamagedError: it cannot be read.
    """
    numbers = [seq for kind in ("base", "delta") for seq, _ in published(folder, kind)]
    return state_at(folder, max(numbers)) if numbers else None


def state_at(folder: Path, seq: int) -> Publication:
    """Return the publication of this number; of a base that was made of deltas the last of these, if it is there.

    Raises:
        DamagedError: it cannot be read, or is not there.
    """
    delta = folder / f"delta_{seq}"
    return read_publication(delta if delta.exists() else folder / f"base_{seq}")


def touched_since(folder: Path, token: str) -> dict[str, BehindRows]:
    """Return the rows of every table in deltas after the state that has the `token`, up to the newest one; and to whom
    these gave them last.

    Raises:
        PublicationError: that state is not in the chain of the newest publication, or a delta is gone or damaged.
    """
    found: dict[str, list[BehindRows]] = {}
    have = newest(folder)
    while have is not None and have.token != token:
        if have.kind != "delta":
            raise PublicationError(_NO_STATE.format(folder))
        tensors = read_files(folder / have.name, have)
        for part in have.parts:
            keys, ids = tensors[part.file][f"{part.place}.keys"], part.changed(tensors[part.file])
            behind = BehindRows(keys) if ids is None else BehindRows(keys, ids.rows, ids.new)
            found.setdefault(part.table, []).append(behind)
        if not any((folder / f"{kind}_{have.seq - 1}").exists() for kind in ("delta", "base")):
            raise PublicationError(_NO_STATE.format(folder))
        below = state_at(folder, have.seq - 1)
        if below.link != have.parent:
            raise PublicationError(f"{folder}: {have.name} does not follow {below.name}")
        have = below
    newest_of = {}
    for table, parts in found.items():  # the newest first: its id counts
        rows, owners = (torch.cat([getattr(part, name) for part in parts]).numpy() for name in ("id_rows", "ids"))
        rows, first = np.unique(rows, return_index=True)
        touched = torch.cat([part.keys for part in parts]).unique()
        newest_of[table] = BehindRows(touched, torch.from_numpy(rows), torch.from_numpy(owners[first]))
    return newest_of


def next_place(folder: Path) -> tuple[int, int, set[str]]:
    """Return the number and the life of the next publication in a folder, and the runs of those that are there."""
    seq, life, runs = -1, -1, set[str]()
    for kind in ("base", "delta"):
        for number, path in published(folder, kind):
            seq = max(seq, number)
            try:
                found = read_publication(path)
            except DamagedError:
                continue
            life, runs = max(life, found.life), runs | {found.run_id}
    return seq + 1, life + 1, runs


def prune(folder: Path, keep_bases: int, needed_from: int | None) -> list[str]:
    """Remove all bases but the newest `keep_bases`, and the deltas up to the oldest of these; return their names.

    Args:
        needed_from: the delta of this number and later ones stay, for resumes; None: there is no checkpoint.
    """
    bases = published(folder, "base")
    going = [path for _, path in bases[:-keep_bases]]
    if bases:
        oldest = bases[-keep_bases:][0][0]
        last = oldest if needed_from is None else min(oldest, needed_from - 1)
        going += [path for seq, path in published(folder, "delta") if seq <= last]
    for path in going:
        leaving = path.with_name(path.name + PARTIAL)
        shutil.rmtree(leaving, ignore_errors=True)
        os.rename(path, leaving)
        shutil.rmtree(leaving)
    return [path.name for path in going]


def claim(folder: Path) -> IO[str] | None:
    """Reserve the folder for this process, until the file that is returned is closed, or the process ends however it
    ends; return None where another process has it. A system without such locks lets all have it."""
    file = (folder / _LOCK).open("a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.close()
            return None
    return file


def remove_leftovers(folder: Path) -> None:
    """Remove what a run left that died."""
    for path in folder.glob(f"*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)
