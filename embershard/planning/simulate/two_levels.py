"""Replays batches through two levels: slots on the device, places in host memory in front of a file.

As in `replay.py`, nothing is modelled: a cache of rows of one byte makes the plans of the device, and the places are
those of a training. A row on the device keeps its place, which is no victim meanwhile. Batches claim their places some
steps before they train; then their rows are read from the file, those that were ever written.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embershard.cache.file.places import Claim, RowPlaces
from embershard.cache.next_use import KnownBatch
from embershard.cache.planner import CacheGrowthWarning
from embershard.cache.row_cache import RowCache
from embershard.cache.tickets import Ticket
from embershard.planning.simulate.replay import bare_cache
from embershard.sharding.run_shape import ReplaySettings


@dataclass(frozen=True)
class Levels:
    """Sizes of the levels, in rows, and how the file is read.

    Attributes:
        num_slots: on the device.
        num_places: in host memory.
        rows_per_page: of the file; a page is read and written as a whole, a row at a time is kept.
        lookahead: batches beyond the one in training that the places know; the device knows those of its settings.
        read_ahead: batches beyond the one in training that have their places.
    """

    num_slots: int
    num_places: int
    rows_per_page: int
    lookahead: int
    read_ahead: int = 8


@dataclass(frozen=True)
class FileTraffic:
    """What a replay read from the file and wrote to it.

    Attributes:
        steps: that were replayed.
        rows_drawn: that were never written before, so that their initial values are drawn.
        rows_read, pages_read: that were written before.
        rows_written, pages_written: that left host memory.
        pages_patched: of the written ones, those that have other written rows, so that they are read first.
        crowded_steps: that found no places for all batches of the read-ahead.
    """

    steps: int = 0
    rows_drawn: int = 0
    rows_read: int = 0
    pages_read: int = 0
    rows_written: int = 0
    pages_written: int = 0
    pages_patched: int = 0
    crowded_steps: int = 0


def replay_two_levels(
    batches: Iterable[tuple[Tensor, Tensor]], rows: Sequence[int], levels: Levels, settings: ReplaySettings
) -> FileTraffic:
    """Replay all batches; device and host memory are empty at the start.

    Args:
        batches: keys of each batch (int64 [N], tables one after another), and ids per table (int64 [T]).
        rows: of each table.
        settings: of the device. Its policy chooses the places, too.

    Raises:
        ValueError: the cache is filled before the first batch; or a batch and the rows on the device do not fit the
            places.

    >>> few = [(torch.tensor([row]), torch.tensor([1])) for row in (0, 1, 2, 3, 0)]
    >>> levels = Levels(num_slots=1, num_places=2, rows_per_page=8, lookahead=1, read_ahead=0)
    >>> found = replay_two_levels(few, [4], levels, ReplaySettings(lookahead=1, prefetch=1))
    >>> found.rows_drawn, found.rows_read, found.rows_written
    (4, 1, 3)
    """
    if settings.policy.warmup:
        raise ValueError("got a policy that fills the cache first, needed one without warm-up: places start empty")
    places, file = RowPlaces(sum(rows), levels.num_places), _FileCounter(sum(rows), levels.rows_per_page)
    names = [str(number) for number in range(len(rows))]
    cache = bare_cache(names, rows, levels.num_slots, settings, transfer=lambda *_: _Recorder(places, file))
    places.rank_by(cache.state.scores.of_rows)
    _run(batches, cache, places, file, levels, settings)
    return FileTraffic(**file.counts)


@dataclass(eq=False)
class _Batch:
    """A batch that is known, and how far it is."""

    keys: Tensor
    lengths: Tensor
    of_places: KnownBatch
    of_device: KnownBatch | None = None
    is_claimed: bool = False
    ticket: Ticket | None = None


def _run(
    batches: Iterable[tuple[Tensor, Tensor]], cache: RowCache, places: RowPlaces, file: _FileCounter, levels: Levels,
    settings: ReplaySettings,
) -> None:  # fmt: skip
    """Run the stages of `LookAheadPipeline`, in its order, without their contents."""
    unknown, known = iter(batches), deque[_Batch]()  # from the one in training on
    device_lookahead = min(settings.lookahead, levels.lookahead)
    prefetch = min(settings.prefetch, device_lookahead)

    def is_claimed(batch: _Batch) -> bool:
        if not batch.is_claimed and (claim := places.claim(batch.keys, batch.of_places)) is not None:
            file.add(claim)
            batch.is_claimed = True
        return batch.is_claimed

    def prepare(batch: _Batch, critical_path: bool) -> bool:
        if batch.ticket is None:
            is_claimed(batch)
            known_as, if_it_fits = batch.of_device, not critical_path
            batch.ticket = cache.prepare(batch.keys, batch.lengths, critical_path, known_as, if_it_fits)
            if batch.ticket is not None:
                places.release(batch.of_places)
        return batch.ticket is not None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheGrowthWarning)
        while True:
            for keys, lengths in itertools.islice(unknown, levels.lookahead + 1 - len(known)):
                uses = keys if settings.policy.by_next_use else keys[:0]
                known.append(_Batch(keys, lengths, places.know(uses)))
            if not known:
                return
            for batch in itertools.islice(known, device_lookahead + 1):
                batch.of_device = batch.of_device or cache.know(batch.keys, batch.lengths)
            now = known[0]
            prepare(now, critical_path=True)
            cache.freeze_pins()
            for batch in itertools.islice(known, 1, levels.read_ahead + 1):
                if batch.ticket is None and not is_claimed(batch):
                    file.counts["crowded_steps"] += 1
                    break
            for batch in itertools.islice(known, 1, prefetch + 1):
                if not prepare(batch, critical_path=False):
                    break
            cache.unfreeze_pins()
            assert now.ticket is not None, "prepared above"
            cache.release(now.ticket)
            known.popleft()
            file.counts["steps"] += 1


class _FileCounter:
    """The rows that are in the file, and what claims of places read from it and write to it.

    Args:
        num_rows: R.
        rows_per_page: of the file.
    """

    def __init__(self, num_rows: int, rows_per_page: int) -> None:
        self._rows_per_page = rows_per_page
        self._is_filed = np.zeros(-(-num_rows // rows_per_page) * rows_per_page, np.bool_)
        self.counts = {field.name: 0 for field in dataclasses.fields(FileTraffic)}

    def add(self, claim: Claim) -> None:
        """Count a claim: what leaves is written before the others are read."""
        if claim.leaving_keys.numel():
            self._write(claim.leaving_keys.numpy())
        self._read(claim.keys.numpy())

    def _read(self, keys: NDArray[np.int64]) -> None:
        filed = keys[self._is_filed[keys]]
        self.counts["rows_drawn"] += keys.size - filed.size
        self.counts["rows_read"] += filed.size
        self.counts["pages_read"] += np.unique(filed // self._rows_per_page).size

    def _write(self, keys: NDArray[np.int64]) -> None:
        self._is_filed[keys] = True
        pages, written = np.unique(keys // self._rows_per_page, return_counts=True)
        filed = np.count_nonzero(self._is_filed.reshape(-1, self._rows_per_page)[pages], axis=1)
        self.counts["rows_written"] += keys.size
        self.counts["pages_written"] += pages.size
        self.counts["pages_patched"] += int(np.count_nonzero(filed > written))


class _Recorder:
    """A `Transfer` that lends places to the device, as `FiledRowCache` does, and moves nothing."""

    key_device = torch.device("cpu")

    def __init__(self, places: RowPlaces, file: _FileCounter) -> None:
        self._places, self._file = places, file
        self._evicted = torch.empty(0, dtype=torch.int64)

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        self._evicted = keys

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        if not self._places.lend(keys):  # not claimed, or given away
            claim = self._places.claim_now(keys)
            if claim is None:
                raise ValueError(
                    f"{keys.numel()} rows of a batch and those on the device need more than "
                    f"{self._places.num_places} places in host memory; give it more, or train smaller batches"
                )
            self._file.add(claim)
            self._places.lend(keys)
        self._places.give_back(self._evicted)

    def finish(self) -> None:
        pass

    def discard(self) -> int:
        return 0
