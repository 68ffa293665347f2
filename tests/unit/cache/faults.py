"""Faults put into the cache on purpose: each must make the invariants' checker fail."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from embershard.cache import planner, row_cache, scores, slot_map, statistics, transfer


@contextlib.contextmanager
def _pins_ignored() -> Iterator[None]:
    pop = planner.VictimQueue.pop

    def unpinned(self: Any, count: int, oldest_pinned: int) -> Tensor:
        self.clear()
        return pop(self, count, 2**31 - 1)

    with mock.patch.object(planner.VictimQueue, "pop", unpinned):
        yield


@contextlib.contextmanager
def _only_the_newest_batch_pinned() -> Iterator[None]:
    choose = planner.CachePlanner.choose_victims

    def lax(self: Any, count: int, oldest_pinned: int) -> Tensor:
        return choose(self, count, max(oldest_pinned, int(self.map.use_stamp.max()) >> 32))

    with mock.patch.object(planner.CachePlanner, "choose_victims", lax):
        yield


@contextlib.contextmanager
def _states_stay_behind() -> Iterator[None]:
    init = transfer.PlainTransfer.__init__

    def weights_only(self: Any, device: list[Tensor], host: list[Tensor]) -> None:
        init(self, device[:1], host[:1])

    with mock.patch.object(transfer.PlainTransfer, "__init__", weights_only):
        yield


@contextlib.contextmanager
def _write_back_skipped() -> Iterator[None]:
    with mock.patch.object(transfer.PlainTransfer, "write_back", return_value=None):
        yield


@contextlib.contextmanager
def _fill_before_write_back() -> Iterator[None]:
    prepare = row_cache.RowCache.prepare

    def swapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        late: list[Any] = []
        move = self.transfer
        with mock.patch.object(move, "write_back", lambda *a: late.append(a)):
            ticket = prepare(self, *args, **kwargs)
        for arguments in late:
            move.write_back(*arguments)
        return ticket

    with mock.patch.object(row_cache.RowCache, "prepare", swapped):
        yield


@contextlib.contextmanager
def _stale_entries_not_skipped() -> Iterator[None]:
    """The queue hands out slots that were used since they were ranked."""

    def trusting(self: Any, count: int, oldest_pinned: int) -> Tensor:
        found = self._slots[self._cursor : self._cursor + count]
        self._cursor += found.numel()
        return found

    with mock.patch.object(planner.VictimQueue, "_take", trusting):
        yield


@contextlib.contextmanager
def _flush_cleans_batches_in_flight() -> Iterator[None]:
    flush = row_cache.RowCache.flush

    def hasty(self: Any) -> None:
        flush(self)
        self.planner.clean_through = self._batch

    with mock.patch.object(row_cache.RowCache, "flush", hasty):
        yield


@contextlib.contextmanager
def _evicted_keys_stay_mapped() -> Iterator[None]:
    with mock.patch.object(slot_map.SlotMap, "unbind", return_value=None):
        yield


@contextlib.contextmanager
def _counts_are_lost() -> Iterator[None]:
    with mock.patch.object(scores.LfuScores, "retire", return_value=None):
        yield


@contextlib.contextmanager
def _every_lookup_counts_as_a_hit() -> Iterator[None]:
    look = planner.CachePlanner.look

    def repeated(self: Any, keys: Tensor, batch: int) -> Any:
        slots, _, positions = look(self, keys, batch)
        return slots, slots != 0, positions

    with mock.patch.object(planner.CachePlanner, "look", repeated):
        yield


@contextlib.contextmanager
def _counters_know_one_table() -> Iterator[None]:
    def first(self: Any, counter: Any, keys: Tensor) -> None:
        self.values[0, counter] += keys.numel()

    with mock.patch.object(statistics.CacheCounters, "add_rows", first):
        yield


@contextlib.contextmanager
def _growing_loses_rows() -> Iterator[None]:
    grow = row_cache.RowCache._grow

    def forgetful(self: Any, *args: Any) -> None:
        grow(self, *args)
        for tensor in self._payload:
            tensor.fill_(torch.nan)

    with mock.patch.object(row_cache.RowCache, "_grow", forgetful):
        yield


FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    name.removeprefix("_"): fault for name, fault in list(globals().items()) if hasattr(fault, "__wrapped__")
}
