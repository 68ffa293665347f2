"""Ids of a table in a checkpoint, as an export has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embershard.cache.ids.config import IdTable
from embershard.cache.ids.id_map import unmixed
from embershard.distributed.checkpoint.load import saved_rows
from embershard.serving.serving_model import IdPlaces


@dataclass(frozen=True, eq=False)
class SavedIds:
    """Which id has which row of a table.

    Attributes:
        num_buckets: of the table.
        ids: int64 [n], ascending, as data have them.
        rows: int32 [n], of each.
        is_used: bool [R], rows that an id has, or ids without a row share.
    """

    num_buckets: int
    ids: Tensor
    rows: Tensor
    is_used: Tensor

    @classmethod
    def of_records(cls, table: str, rules: IdTable, records: Tensor) -> SavedIds:
        """Return what the tensor [R, 2] of ids in a state dict says (`IdMap.tensors`)."""
        buckets = rules.buckets_of(table, len(records))
        is_used = records[:, 1] >= 0
        rows = is_used.nonzero().flatten()
        ids, order = torch.from_numpy(unmixed(records[rows, 0].numpy())).sort()
        if rules.unadmitted == "shared":
            is_used[:: buckets.rows] = True
        return cls(buckets.num_buckets, ids, rows[order].int(), is_used)

    @classmethod
    def read(cls, checkpoint: Path, tensor: str, table: str, rules: IdTable) -> SavedIds:
        """Read those of a verified checkpoint.

        Args:
            tensor: name of the table's weights in it.

        Raises:
            CheckpointError: it has none.
        """
        records = torch.cat(list(saved_rows(checkpoint, f"{tensor.removesuffix('weight')}ids")))
        return cls.of_records(table, rules, records)

    def cleared(self, blocks: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield blocks of the table's rows, with zeros in those that nobody uses: they hold what an id left, or what
        one will begin with."""
        first = 0
        for block in blocks:
            is_used = self.is_used[first : first + len(block)]
            yield block.where(is_used.unsqueeze(1), block.new_zeros(()))
            first += len(block)

    def places(self) -> IdPlaces:
        """Return where each id is, as an exported model has it."""
        return IdPlaces(self.ids, self.rows, len(self.is_used), self.num_buckets)

    def owners(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the ids of rows `first` to `first + count`, and which of them none has."""
        ids, has_none = np.zeros(len(self.is_used), np.int64), np.ones(len(self.is_used), np.bool_)
        ids[self.rows], has_none[self.rows] = self.ids, False
        return ids[first : first + count], has_none[first : first + count]

    def tensors(self) -> dict[str, Tensor]:
        """Return what an export's file has."""
        return {"ids": self.ids, "rows": self.rows}
