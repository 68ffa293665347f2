"""Device cache over rows of which some are in a file: a `RowCache` that also moves rows between file and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embershard.cache.file.filed_rows import FiledRows
from embershard.cache.gpu.readback import Reads
from embershard.cache.next_use import KnownBatch
from embershard.cache.planner import CachePlan
from embershard.cache.row_cache import RowCache
from embershard.cache.rows.transfer import PlainTransfer, StagedTransfer, Transfer
from embershard.cache.tickets import Ticket


@dataclass(eq=False)
class _Announced:
    """A batch on its way to being known to the places: its ids and their number per feature, in host memory once `sent`
    is over; and what the places know it as."""

    keys: Tensor
    lengths: Tensor
    sent: torch.cuda.Event | None
    known: KnownBatch | None = None


class FiledRowCache(RowCache):
    """A `RowCache` over `FiledRows`. A batch that is known should be filed (`file`) some steps before it is prepared.

    On a GPU the ids of a batch are copied to host memory as it becomes known, and read from there steps later; a plan's
    rows are in host memory by the next plan, and their places are given back then.

    Args:
        filed: the rows.
        arguments: those of `RowCache`, but for the transfer.
    """

    def __init__(self, filed: FiledRows, **arguments: Any) -> None:
        self.filed = filed
        self._announced: dict[KnownBatch, _Announced] = {}  # by what the slots know them as, in their order
        self._num_told = 0  # of these, the first are known to the places, too
        self._landing = torch.empty(0, dtype=torch.int64)  # rows that were evicted, and may not be in host memory yet
        super().__init__(**arguments, transfer=lambda slots, _: FiledTransfer(slots, filed))
        filed.places.rank_by(self._scores.of_rows)

    def know(self, keys: Tensor, feature_lengths: Tensor) -> KnownBatch | None:
        """As every cache."""
        with self._lock, torch.no_grad():
            known = super().know(keys, feature_lengths)
            if known is not None:
                self._announced[known] = self._sent(keys, feature_lengths)
                self._tell(None)
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
            if announced is None:
                return True
            of_places = self._tell(announced)
            assert of_places is not None, "told just now"
            return self.filed.file(announced.keys if keys.is_cuda else keys, of_places)

    def _sent(self, keys: Tensor, lengths: Tensor) -> _Announced:
        if keys.is_cpu:
            return _Announced(keys, lengths, None)
        on_host = [
            torch.empty(each.shape, dtype=each.dtype, pin_memory=True).copy_(each, non_blocking=True)
            for each in (keys, lengths)
        ]
        return _Announced(on_host[0], on_host[1], torch.cuda.current_stream(keys.device).record_event())

    def _tell(self, last: _Announced | None) -> KnownBatch | None:
        """Make batches known to the places, in their order: up to `last`, or (None) those whose ids are there."""
        if last is not None and last.known is not None:
            return last.known
        for announced in list(self._announced.values())[self._num_told :]:
            if announced.sent is not None:
                if last is None and not announced.sent.query():
                    break
                announced.sent.synchronize()
            announced.known = self.filed.know(announced.keys, announced.lengths)
            self._num_told += 1
            if announced.sent is None:
                announced.keys = announced.lengths = announced.keys[:0]  # the callers have them
            if announced is last:
                break
        return None if last is None else last.known

    def _forgotten(self, known: KnownBatch | None) -> tuple[KnownBatch | None, Tensor | None]:
        """Remove a batch from those announced; return what the places know it as, and its ids from a GPU."""
        announced = None if known is None else self._announced.get(known)
        if known is None or announced is None:
            return None, None
        self._tell(announced)
        del self._announced[known]
        self._num_told -= 1
        return announced.known, announced.keys

    @property
    def chain_bytes(self) -> int:
        """As every cache, with the links of the places."""
        return super().chain_bytes + self.filed.places.chain_bytes

    def preparing(self, keys: Tensor, lengths: Tensor, critical_path: bool, *rest: Any) -> Reads[Ticket | None]:
        """As every cache."""
        self.file(keys, rest[0] if rest else None)
        return super().preparing(keys, lengths, critical_path, *rest)

    def skip(self, keys: Tensor, known: KnownBatch) -> None:
        """As every cache."""
        with self._lock, torch.no_grad():
            super().skip(keys, known)
            of_places, of_gpu = self._forgotten(known)
            if of_places is not None and of_gpu is not None:
                self.filed.skip(of_places, of_gpu if keys.is_cuda else keys)

    def forget(self) -> None:
        """As every cache."""
        with self._lock:
            super().forget()
            self._announced.clear()
            self._num_told = 0
            self.filed.forget()

    def _preload(self, keys: Tensor) -> None:
        self.filed.bring_in(keys.cpu(), None)
        super()._preload(keys)

    def _execute(self, plan: CachePlan, known: KnownBatch | None, *rest: Any) -> torch.cuda.Event | None:
        of_places, _ = self._forgotten(known)
        self.filed.bring_in(plan.fill_keys.cpu(), of_places)
        moved, landed = plan.evicted_keys, self._landing
        try:
            return super()._execute(plan, known, *rest)
        except BaseException:
            self._copies.finish()
            moved = torch.cat([plan.fill_keys, plan.evicted_keys])
            moved = moved[self._map.lookup(moved) == 0]
            raise
        finally:
            self.filed.give_back(landed if moved.is_cuda else moved)
            self._landing = moved.cpu() if moved.is_cuda else landed


class FiledTransfer:
    """Transfer between slots and the places of rows in host memory. The methods are those of `Transfer`.

    Args:
        slots: payload tensors by slot, [S + 1, ...] each.
        filed: the rows; those that move are lent.
    """

    def __init__(self, slots: Sequence[Tensor], filed: FiledRows) -> None:
        kind = StagedTransfer if slots[0].is_cuda else PlainTransfer
        self._inner: Transfer = kind(slots, filed.parts)
        self._filed, self.key_device = filed, self._inner.key_device

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        self._inner.fill(self._filed.places_of(keys), slots)

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        self._inner.write_back(slots, self._filed.places_of(keys))

    def finish(self) -> None:
        self._inner.finish()

    def discard(self) -> int:
        return self._inner.discard()
