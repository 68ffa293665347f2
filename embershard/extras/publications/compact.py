"""Makes a base of an earlier one and the deltas after it, beside training and without its memory."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from embershard.distributed.changed_rows import NO_ID
from embershard.distributed.publish.published import (
    DENSE,
    IDS,
    Publication,
    PublicationError,
    check_next,
    file_entries,
    ids_behind,
    ids_of_base,
    published,
    read_files,
    read_publication,
    verify,
)
from embershard.distributed.tensors_file import safetensors
from embershard.extras.publications.write import PARTIAL, finish, sync_files

_TYPES = {"fp32": np.float32, "fp16": np.float16}


def make_base(folder: Path, seq: int | None = None) -> Publication:
    """Make `base_<seq>` of the newest base before it and the deltas up to that number, and return it.

    Args:
        seq: None: of the newest delta.

    Raises:
        PublicationError: a base or a delta is missing, damaged, or does not follow the one before; or the new base is
            there already.
        OSError: the base could not be written; nothing of it is left.
    """
    numbers = [found for found, _ in published(folder, "delta")]
    last = max(numbers, default=0) if seq is None else seq
    bases = [path for found, path in published(folder, "base") if found < last]
    if not numbers or not bases:
        raise PublicationError(f"{folder}: no base with deltas after it")
    if (folder / f"base_{last}").exists():
        raise PublicationError(f"{folder}: base_{last} is there already")
    have = verify(bases[-1])  # nothing that is damaged gets a new checksum
    partial = folder / f"base_{last}{PARTIAL}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(bases[-1], partial)
        ids = ids_of_base(partial)
        for number in range(have.seq + 1, last + 1):
            path = folder / f"delta_{number}"
            delta = read_publication(path)
            check_next(delta, have, folder)
            files = read_files(path, delta)
            ids = ids_behind(ids, path, delta, files)
            _write_rows(partial, delta, files)
            have = delta
        for name, (own, rows) in ids.items():
            (partial / "tables" / f"{name}{IDS}").write_bytes(b"".join(safetensors({"ids": own, "rows": rows})))
        shutil.copyfile(folder / have.name / DENSE, partial / DENSE)
        about = json.loads((partial / "export.json").read_text(encoding="utf-8"))
        (partial / "export.json").write_text(json.dumps({**about, "step": have.step}, indent=1) + "\n")
        sync_files(partial)
        base = replace(have, kind="base", parent="", parts=(), state=have.link, files=file_entries(partial))
        finish(partial, folder / base.name, base)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return base


def _write_rows(base: Path, delta: Publication, files: dict[str, dict[str, Tensor]]) -> None:
    for part in delta.parts:
        keys, rows = (files[part.file][f"{part.place}.{name}"].numpy() for name in ("keys", "rows"))
        path = base / "tables" / f"{part.table}.safetensors"
        with path.open("rb") as file:
            header = struct.unpack("<Q", file.read(8))[0]
        table = np.memmap(path, _TYPES[delta.dtype], "r+", 8 + header, delta.tables[part.table])
        if (changed := part.changed(files[part.file])) is not None:
            table[changed.rows[changed.new == NO_ID].numpy()] = 0
        table[keys, part.first_column : part.first_column + part.num_columns] = rows
        table.flush()
