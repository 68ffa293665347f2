"""Device cache over rows of which some are in a file: a `RowCache` that also moves rows between file and memory."""

from __future__ import annotations

from collections import deque
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
from embershard.cache.rows.memory import pinned_bytes
from embershard.cache.rows.transfer import PlainTransfer, StagedTransfer, Transfer
from embershard.cache.tickets import Ticket


@dataclass(eq=False)
class _OfPlaces:
    """A known batch as the places know it, or will once its ids are in host memory.

    Attributes:
        ids: on a GPU, keys and number of ids per feature in host memory, once `sent` is over; else None.
        known: what the places know the batch as; None until then.
    """

    ids: list[Tensor] | None = None
    sent: torch.cuda.Event | None = None
    known: KnownBatch | None = None

    @property
    def num_bytes(self) -> int:
        """Host memory, in bytes."""
        of_ids = sum(pinned_bytes(each.nbytes) for each in self.ids or ())
        return of_ids + (0 if self.known is None else self.known.num_bytes)


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
        self._of_places: dict[KnownBatch, _OfPlaces] = {}  # by what the slots know them as
        self._untold = deque[_OfPlaces]()  # of which the places do not know yet
        self._of_places_bytes = 0
        self._landing = torch.empty(0, dtype=torch.int64)  # rows that were evicted, and may not be in host memory yet
        super().__init__(**arguments, transfer=lambda slots, _: FiledTransfer(slots, filed))
        filed.places.rank_by(self._scores.of_rows)

    def know(self, keys: Tensor, feature_lengths: Tensor) -> KnownBatch | None:
        """As every cache."""
        with self._lock, torch.no_grad():
            known = super().know(keys, feature_lengths)
            if known is not None:
                batch = _OfPlaces()
                if keys.is_cpu:
                    batch.known = self.filed.know(keys, feature_lengths)
                else:
                    self._send(batch, keys, feature_lengths)
                self._of_places[known] = batch
                self._of_places_bytes += batch.num_bytes
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
            batch = None if known is None else self._of_places.get(known)
            return batch is None or self.filed.file(keys if batch.ids is None else batch.ids[0], self._told(batch))

    def _send(self, batch: _OfPlaces, *ids: Tensor) -> None:
        """Begin to copy a batch's ids to host memory, from where the places learn them."""
        batch.ids = [
            torch.empty(each.shape, dtype=each.dtype, pin_memory=True).copy_(each, non_blocking=True) for each in ids
        ]
        batch.sent = torch.cuda.current_stream(ids[0].device).record_event()
        self._untold.append(batch)

    def _tell(self, last: _OfPlaces | None) -> None:
        """Make batches known to the places, in their order: up to `last`, or (None) those whose ids are there."""
        while self._untold and (last is None or last.known is None):
            batch = self._untold[0]
            assert batch.sent is not None, "it waits for its ids"
            assert batch.ids is not None, "which are on their way"
            if last is None and not batch.sent.query():
                break
            batch.sent.synchronize()
            batch.known = self.filed.know(*batch.ids)
            self._untold.popleft()
            self._of_places_bytes += batch.known.num_bytes

    def _told(self, batch: _OfPlaces) -> KnownBatch:
        """Make a batch known to the places, if it is not; return what they know it as."""
        self._tell(batch)
        assert batch.known is not None, "told just now"
        return batch.known

    def _removed(self, known: KnownBatch | None) -> _OfPlaces | None:
        """Remove a batch from those that the places know, and return it; None if it is none of them."""
        batch = None if known is None else self._of_places.pop(known, None)
        if batch is not None:
            self._tell(batch)
            self._of_places_bytes -= batch.num_bytes
        return batch

    @property
    def known_bytes(self) -> int:
        """As every cache; on a CPU with what the places know, which is in its memory, too."""
        return super().known_bytes + (self.known_host_bytes if self._map.device.type == "cpu" else 0)

    @property
    def known_host_bytes(self) -> int:
        """Host memory of what the places know of batches, in bytes."""
        return self._of_places_bytes + self.filed.places.chain_bytes

    @property
    def knows_most(self) -> bool:
        """True if the places know as many uses of rows as can be told apart for sure."""
        return self.filed.places.knows_most

    def preparing(self, keys: Tensor, lengths: Tensor, critical_path: bool, *rest: Any) -> Reads[Ticket | None]:
        """As every cache."""
        self.file(keys, rest[0] if rest else None)
        return super().preparing(keys, lengths, critical_path, *rest)

    def skip(self, keys: Tensor, known: KnownBatch) -> None:
        """As every cache."""
        with self._lock, torch.no_grad():
            super().skip(keys, known)
            if (batch := self._removed(known)) is not None:
                self.filed.skip(self._told(batch), keys if batch.ids is None else batch.ids[0])

    def forget(self) -> None:
        """As every cache."""
        with self._lock:
            super().forget()
            self._of_places.clear()
            self._untold.clear()
            self._of_places_bytes = 0
            self.filed.forget()

    def _preload(self, keys: Tensor) -> None:
        self.filed.bring_in(keys.cpu(), None)
        super()._preload(keys)

    def _execute(self, plan: CachePlan, known: KnownBatch | None, *rest: Any) -> torch.cuda.Event | None:
        batch = self._removed(known)
        filled, moved, landed = plan.on_host.fill, plan.on_host.evicted, self._landing
        self.filed.bring_in(filled, None if batch is None else batch.known)
        try:
            return super()._execute(plan, known, *rest)
        except BaseException:
            self._copies.finish()
            either = torch.cat([plan.fill_keys, plan.evicted_keys])
            moved = either[self._map.lookup(either) == 0].cpu()
            raise
        finally:
            # A row that comes again right behind the plan that evicted it is lent again, not given back.
            on_gpu = plan.fill_keys.is_cuda
            self.filed.give_back(landed[~torch.isin(landed, filled)] if on_gpu else moved)
            self._landing = moved if on_gpu else landed


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
