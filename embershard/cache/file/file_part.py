"""Rows in a file as a part of a pool, which moves rows between file and host memory; and their transfer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from embershard.cache.file.places import READ_AHEAD, RowPlaces
from embershard.cache.next_use import KnownBatch
from embershard.cache.parts.part import PoolPart
from embershard.cache.rows.memory import pinned_bytes


@dataclass(eq=False)
class _OfPlaces:
    """A known batch as the places know it, or will once its ids are in host memory.

    Attributes:
        ids: on a GPU, keys and number of ids per feature in host memory, once `sent` is over; else None.
        known: what the places know the batch as; None until then.
        is_filed: its rows have places.
    """

    ids: list[Tensor] | None = None
    sent: torch.cuda.Event | None = None
    known: KnownBatch | None = None
    is_filed: bool = False

    @property
    def num_bytes(self) -> int:
        """Host memory, in bytes."""
        of_ids = sum(pinned_bytes(each.nbytes) for each in self.ids or ())
        return of_ids + (0 if self.known is None else self.known.num_bytes)


class PlacedRows(Protocol):
    """What a part needs of rows in a file; see `FiledRows`."""

    places: RowPlaces

    def know(self, keys: Tensor, feature_lengths: Tensor) -> KnownBatch: ...

    def file(self, keys: Tensor, known: KnownBatch) -> bool: ...

    def bring_in(self, keys: Tensor, known: KnownBatch | None) -> None: ...

    def unpin(self, keys: Tensor) -> None: ...

    def skip(self, known: KnownBatch, keys: Tensor) -> None: ...

    def forget(self) -> None: ...


class FilePart(PoolPart):
    """The part of a pool whose rows are in a file: what its batches need is in host memory some steps before.

    On a GPU the ids of a batch are copied to host memory as it becomes known, and read from there steps later; a plan's
    rows are in host memory by the next plan, and their places are given back then.

    Args:
        filed: the rows.
        scores: float32 [R] of the rows by which the pool's policy ranks them, or None: they rank places, too.
        is_on_gpu: the pool plans there.
    """

    num_coming = READ_AHEAD
    hears_moves = True

    def __init__(self, filed: PlacedRows, scores: Callable[[], Tensor | None], is_on_gpu: bool) -> None:
        self._filed, self._is_on_gpu = filed, is_on_gpu
        self._of_places: dict[KnownBatch, _OfPlaces] = {}  # by what the slots know them as
        self._untold = deque[_OfPlaces]()  # of which the places do not know yet
        self._of_places_bytes = 0
        none = torch.empty(0, dtype=torch.int64)
        self._entering = self._landing = none  # for the last plan; and that left before it, maybe not in memory yet
        self._lock = threading.RLock()
        filed.places.rank_by(scores)

    def known(self, keys: Tensor, feature_lengths: Tensor, known: KnownBatch) -> None:
        """Let the places know it, too."""
        with self._lock, torch.no_grad():
            batch = _OfPlaces()
            if self._is_on_gpu:
                self._send(batch, keys, feature_lengths)
            else:
                batch.known = self._filed.know(keys, feature_lengths)
            self._of_places[known] = batch
            self._of_places_bytes += batch.num_bytes
            self._tell(None)

    def coming(self, keys: Tensor, known: KnownBatch | None) -> bool:
        """Give its rows places in memory, and begin to read those in the file."""
        batch = None if known is None else self._of_places.get(known)
        if batch is None or batch.is_filed:
            return True
        with self._lock, torch.no_grad():
            batch.is_filed = self._filed.file(keys if batch.ids is None else batch.ids[0], self._told(batch))
        return batch.is_filed

    def entering(self, keys: Tensor, known: KnownBatch | None) -> None:
        """Wait until the rows are in memory, and pin their places."""
        batch, self._entering = self._removed(known), keys
        self._filed.bring_in(keys, None if batch is None else batch.known)

    def left(self, keys: Tensor) -> None:
        """Take their places back; on a GPU with the next plan, but for rows that this one brings again."""
        if self._is_on_gpu:
            keys, self._landing = self._landing, keys
            keys = keys[~torch.isin(keys, self._entering)]
        self._filed.unpin(keys)

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
            batch.known = self._filed.know(*batch.ids)
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

    def skipped(self, keys: Tensor, known: KnownBatch) -> None:
        """Take its places back."""
        with self._lock, torch.no_grad():
            if (batch := self._removed(known)) is not None:
                self._filed.skip(self._told(batch), keys if batch.ids is None else batch.ids[0])

    def forgotten(self) -> None:
        """Take all places back."""
        with self._lock:
            self._of_places.clear()
            self._untold.clear()
            self._of_places_bytes = 0
            self._filed.forget()

    @property
    def known_bytes(self) -> int:
        """On a CPU what the places know, which is in its memory, too."""
        return 0 if self._is_on_gpu else self.known_host_bytes

    @property
    def known_host_bytes(self) -> int:
        """Host memory of what the places know of batches, in bytes."""
        return self._of_places_bytes + self._filed.places.chain_bytes

    @property
    def knows_most(self) -> bool:
        """True if the places know as many uses of rows as can be told apart for sure."""
        return self._filed.places.knows_most
