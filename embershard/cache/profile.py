"""How often each row of each table occurs in a data set: counted once, saved as a file, read by the
policies."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embershard.errors import ConfigError, DataError, IdOutOfRangeError

_FORMAT = 1
_PREFIX = "counts/"
_DAMAGE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    EOFError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True)
class FrequencyProfile:
    """Row counts per table.

    ``counts[table]`` is an int64 tensor [rows]: how many lookups each row got. ``num_batches`` is the number
    of batches that were counted. Immutable by convention: the tensors are not to be written to.

    >>> profile = FrequencyProfile.count([{"user": torch.tensor([3, 1, 3])}], {"user": 5})
    >>> profile.counts["user"].tolist()
    [0, 1, 0, 2, 0]
    """

    counts: Mapping[str, Tensor]
    num_batches: int

    @classmethod
    def count(cls, batches: Iterable[Mapping[str, Tensor]], num_rows: Mapping[str, int]) -> FrequencyProfile:
        """One pass over ``batches``, each a mapping table name -> ids (int, any shape; absent tables are
        empty).

        Raises:
            DataError: a batch names a table that ``num_rows`` does not.
            IdOutOfRangeError: an id is negative or not smaller than its table's rows.
        """
        counts = {table: torch.zeros(rows, dtype=torch.int64) for table, rows in num_rows.items()}
        num_batches = 0
        for num_batches, batch in enumerate(batches, start=1):
            for table, ids in batch.items():
                if table not in counts:
                    raise DataError(f"batch {num_batches} has ids of table {table!r}; known are {sorted(counts)}")
                _add_counts(counts[table], table, ids.reshape(-1))
        return cls(counts, num_batches)

    def num_rows(self, table: str) -> int:
        """Rows of ``table``."""
        return self.counts[table].numel()

    def shard(self, table: str, rows: int, row_offset: int, local_rows: int) -> Tensor:
        """Counts of rows [row_offset, row_offset + local_rows) of ``table``: int64 [local_rows].

        Raises:
            ConfigError: the profile does not know the table, or was made for another number of rows.
        """
        if table not in self.counts:
            raise ConfigError(
                f"the frequency profile has no table {table!r}, only {sorted(self.counts)}; "
                "make it from the same data and model"
            )
        if self.num_rows(table) != rows:
            raise ConfigError(
                f"the frequency profile counted {self.num_rows(table)} rows of table {table!r}, the model "
                f"has {rows}; make it again with the model's row counts"
            )
        return self.counts[table][row_offset : row_offset + local_rows]

    def save(self, path: str | Path) -> None:
        """Write a ``.npz`` file without pickle; tables with few occurring rows stay small (compressed)."""
        arrays = {_PREFIX + table: counts.numpy() for table, counts in self.counts.items()}
        meta = np.array([_FORMAT, self.num_batches], dtype=np.int64)
        with open(path, "wb") as file:
            np.savez_compressed(file, format=meta, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | Path) -> FrequencyProfile:
        """Read what :meth:`save` wrote; nothing is unpickled.

        Raises:
            DataError: the file is missing, damaged, or not a profile.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                version, num_batches = (int(value) for value in file["format"])
                counts = {
                    name.removeprefix(_PREFIX): torch.from_numpy(file[name])
                    for name in file.files
                    if name.startswith(_PREFIX)
                }
        except _DAMAGE as error:
            raise DataError(
                f"{path} is not a frequency profile: {error}. Make one with FrequencyProfile.save"
            ) from error
        if version != _FORMAT:
            raise DataError(f"{path} is a frequency profile of format {version}, this version reads {_FORMAT}")
        for table, values in counts.items():
            if values.dtype != torch.int64 or values.dim() != 1 or bool((values < 0).any()):
                raise DataError(
                    f"{path}: the counts of table {table!r} are {values.dtype} {list(values.shape)}; needed are "
                    "int64 [rows], none of them negative. Make the profile again"
                )
        return cls(counts, num_batches)


def _add_counts(counts: Tensor, table: str, ids: Tensor) -> None:
    if ids.numel() == 0:
        return
    if ids.is_floating_point():
        raise DataError(f"table {table!r}: ids are {ids.dtype}; needed are whole numbers")
    ids = ids.to("cpu", torch.int64)
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= counts.numel():
        bad = low if low < 0 else high
        raise IdOutOfRangeError(f"table {table!r}: id {bad} is not in [0, {counts.numel()}); check the id mapping")
    if counts.numel() <= 4 * ids.numel():
        counts += torch.bincount(ids, minlength=counts.numel())
    else:  # a batch is small beside a large table: touch the batch's rows only
        unique, occurrences = ids.unique(return_counts=True)
        counts[unique] += occurrences
