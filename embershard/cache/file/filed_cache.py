"""Device cache over rows of which some are in a file: a `RowCache` that also moves rows between file and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from embershard.cache.file.filed_rows import FiledRows
from embershard.cache.gpu.readback import Reads
from embershard.cache.next_use import KnownBatch
from embershard.cache.planner import CachePlan
from embershard.cache.row_cache import RowCache
from embershard.cache.rows.transfer import PlainTransfer
from embershard.cache.tickets import Ticket


class FiledRowCache(RowCache):
    """A `RowCache` over `FiledRows`. A batch that is known should be filed (`file`) some steps before it is prepared.

    Args:
        filed: the rows.
        arguments: those of `RowCache`, but for the transfer.
    """

    def __init__(self, filed: FiledRows, **arguments: Any) -> None:
        self.filed = filed
        self._announced: dict[KnownBatch, KnownBatch] = {}  # as the slots know it, and as the places do
        super().__init__(**arguments, transfer=lambda slots, _: FiledTransfer(slots, filed))

    def know(self, keys: Tensor, feature_lengths: Tensor) -> KnownBatch | None:
        """As every cache."""
        with self._lock:
            known = super().know(keys, feature_lengths)
            if known is not None:
                self._announced[known] = self.filed.know(keys, feature_lengths)
            return known

    def file(self, keys: Tensor, known: KnownBatch | None) -> bool:
        """Give the rows of a batch that is prepared some steps later places in memory, and begin to read those in the
        file. A second call does nothing.

        Args:
            keys, known: as for `prepare`.

        Returns:
            False if they do not fit yet.
        """
        with self._lock, torch.no_grad():
            announced = None if known is None else self._announced.get(known)
            return announced is None or self.filed.file(keys, announced)

    @property
    def chain_bytes(self) -> int:
        """As every cache, with the links of the places."""
        return super().chain_bytes + self.filed.index.chain_bytes

    def preparing(self, keys: Tensor, lengths: Tensor, critical_path: bool, *rest: Any) -> Reads[Ticket | None]:
        """As every cache."""
        self.file(keys, rest[0] if rest else None)
        return super().preparing(keys, lengths, critical_path, *rest)

    def skip(self, keys: Tensor, known: KnownBatch) -> None:
        """As every cache."""
        with self._lock:
            super().skip(keys, known)
            if (announced := self._announced.pop(known, None)) is not None:
                self.filed.skip(announced, keys)

    def forget(self) -> None:
        """As every cache."""
        with self._lock:
            super().forget()
            self._announced.clear()
            self.filed.forget()

    def _preload(self, keys: Tensor) -> None:
        self.filed.bring_in(keys, None)
        super()._preload(keys)

    def _execute(self, plan: CachePlan, known: KnownBatch | None, *rest: Any) -> torch.cuda.Event | None:
        announced = None if known is None else self._announced.pop(known, None)
        self.filed.bring_in(plan.fill_keys, announced)
        moved = plan.evicted_keys
        try:
            return super()._execute(plan, known, *rest)
        except BaseException:
            moved = torch.cat([plan.fill_keys, plan.evicted_keys])
            moved = moved[self._map.lookup(moved) == 0]
            raise
        finally:
            self.filed.give_back(moved)


class FiledTransfer(PlainTransfer):
    """Transfer between slots and the places of rows in host memory, on a CPU. The methods are those of `Transfer`.

    Args:
        slots: payload tensors by slot, [S + 1, ...] each.
        filed: the rows; those that move are lent.
    """

    def __init__(self, slots: Sequence[Tensor], filed: FiledRows) -> None:
        super().__init__(slots, filed.parts)
        self._filed = filed

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        super().fill(self._filed.places(keys), slots)

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        super().write_back(slots, self._filed.places(keys))
