"""Faults put into the cache on purpose: each must make the invariants' checker fail."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from embershard.cache import eviction as victims
from embershard.cache import next_use as next_use_index
from embershard.cache import planner, row_cache, slot_map, statistics, tickets
from embershard.cache import policies as scores
from embershard.cache.rows import transfer


@contextlib.contextmanager
def _pins_ignored() -> Iterator[None]:
    """And no assertion stands in the way: the rows tell."""
    pop = victims.VictimQueue.pop

    def unpinned(self: Any, count: int, oldest_pinned: int) -> Tensor:
        self.clear()
        return pop(self, count, 2**31 - 1)

    unchecked = mock.patch.object(tickets.InFlight, "check_victims", return_value=None)
    with mock.patch.object(victims.VictimQueue, "pop", unpinned), unchecked:
        yield


@contextlib.contextmanager
def _only_the_newest_batch_pinned() -> Iterator[None]:
    choose = planner.CachePlanner._choose_victims

    def lax(self: Any, count: int, oldest_pinned: int) -> Tensor:
        return choose(self, count, max(oldest_pinned, int(self._map.use_stamp.max()) >> 32))

    with mock.patch.object(planner.CachePlanner, "_choose_victims", lax):
        yield


@contextlib.contextmanager
def _growth_unpins() -> Iterator[None]:
    """The plan that follows a growth takes slots of batches that train together; no assertion stands in its way."""
    plan, lacking = planner.CachePlanner.plan, set[int]()

    def lax(self: Any, keys: Tensor, batch: int, oldest_pinned: int) -> Any:
        found = plan(self, keys, batch, batch if batch in lacking else oldest_pinned)
        lacking.clear()
        if isinstance(found, planner.Shortage):
            lacking.add(batch)
        return found

    unchecked = mock.patch.object(tickets.InFlight, "check_victims", return_value=None)
    with mock.patch.object(planner.CachePlanner, "plan", lax), unchecked:
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
        late: list[tuple[Tensor, Tensor]] = []
        move = self._copies.transfer
        with mock.patch.object(move, "write_back", lambda *slots_and_keys: late.append(slots_and_keys)):
            ticket = prepare(self, *args, **kwargs)
        for slots, keys in late:
            move.write_back(slots, keys)
        return ticket

    with mock.patch.object(row_cache.RowCache, "prepare", swapped):
        yield


@contextlib.contextmanager
def _stale_entries_not_skipped() -> Iterator[None]:
    """The queue hands out slots that were used since they were ranked."""

    def trusting(self: Any, ranked: Any, oldest_pinned: int) -> Tensor:
        return torch.arange(ranked.slots.numel())

    with mock.patch.object(victims.VictimQueue, "_usable", trusting):
        yield


@contextlib.contextmanager
def _stale_entries_not_skipped_by_the_loop() -> Iterator[None]:
    """The same with look-ahead: nothing tells the compiled loop that a slot was used since, or is pinned."""
    lowest = victims.VictimQueue._lowest

    def trusting(self: Any, count: int, oldest_pinned: int, ready: Any) -> Any:
        stamps = self._map.use_stamp.index_select(0, self._queue.slots)
        with mock.patch.object(self, "_queue", dataclasses.replace(self._queue, stamps=stamps)):
            return lowest(self, count, 2**31 - 1, ready)

    with mock.patch.object(victims.VictimQueue, "_lowest", trusting):
        yield


@contextlib.contextmanager
def _rows_used_again_are_not_offered() -> Iterator[None]:
    """A row that will not be used again is the best victim, but only the next refill finds it."""
    with mock.patch.object(victims.VictimQueue, "offer", return_value=None):
        yield


@contextlib.contextmanager
def _slots_of_batches_in_flight_are_not_offered() -> Iterator[None]:
    """What a batch in flight uses is not in the ranking, and would be missing when the batch is released."""
    with mock.patch.object(victims.VictimQueue, "_offer_pinned", return_value=None):
        yield


@contextlib.contextmanager
def _rows_that_become_known_are_skipped() -> Iterator[None]:
    """A row whose next use became known since it was ranked may still be the best victim."""
    lowest = victims.VictimQueue._lowest

    def without(self: Any, count: int, oldest_pinned: int, ready: Any) -> Any:
        same, queue = [part.select(self._usable(part, oldest_pinned)) for part in ready], self._queue
        has_changed = self._next_use_index.next_use.index_select(0, queue.slots) != queue.next_uses
        stamps = queue.stamps.masked_fill(has_changed, -1)  # as if used since
        with mock.patch.object(self, "_queue", dataclasses.replace(queue, stamps=stamps)):
            return lowest(self, count, oldest_pinned, same)

    with mock.patch.object(victims.VictimQueue, "_lowest", without):
        yield


@contextlib.contextmanager
def _known_uses_do_not_matter() -> Iterator[None]:
    rank, state, better = (getattr(victims.VictimQueue, name) for name in ("_rank", "_state", "_better"))

    def by_score(self: Any, slots: Tensor | None = None) -> Any:
        with mock.patch.object(self, "_next_use_index", None):
            ranked = rank(self, slots)
        return dataclasses.replace(ranked, next_uses=torch.zeros(ranked.slots.shape, dtype=torch.int32))

    def without_next_uses(self: Any) -> Any:
        use_stamps, next_uses, score_bits = state(self)
        return use_stamps, next_uses * 0, score_bits

    def better_by_score(self: Any, slots: Tensor, next_uses: Tensor) -> Any:
        return better(self, slots, next_uses * 0)

    with (
        mock.patch.object(victims.VictimQueue, "_rank", by_score),
        mock.patch.object(victims.VictimQueue, "_state", without_next_uses),
        mock.patch.object(victims.VictimQueue, "_better", better_by_score),
    ):
        yield


@contextlib.contextmanager
def _uses_after_the_next_one_are_forgotten() -> Iterator[None]:
    arrive = next_use_index.NextUseIndex.arrive

    def shortsighted(self: Any, batch: Any, slots: Tensor) -> Any:
        arrived = arrive(self, batch, slots)
        if arrived is not None:
            self.next_use[arrived[0]] = 0
        return arrived

    with mock.patch.object(next_use_index.NextUseIndex, "arrive", shortsighted):
        yield


@contextlib.contextmanager
def _evicted_rows_leave_no_trace() -> Iterator[None]:
    def nothing(self: Any, slots: Tensor) -> Tensor:
        return torch.zeros(slots.shape, dtype=torch.int32)

    with mock.patch.object(next_use_index.NextUseIndex, "traces", nothing):
        yield


@contextlib.contextmanager
def _repeats_are_uses_of_their_own() -> Iterator[None]:
    """The chain of a row's uses is that of whichever repeat comes first, not of the one that others follow."""
    know = next_use_index.NextUseIndex.know

    def careless(self: Any, keys: Tensor, feature_lengths: Tensor) -> Any:
        batch = know(self, keys, feature_lengths)
        places = self._tables.features.repeat_interleave(feature_lengths).nonzero().flatten()
        order = keys[places].argsort(stable=True)
        first = keys[places][order].diff(prepend=keys.new_full((1,), -1)) != 0
        object.__setattr__(batch, "uses", order[first].int())
        object.__setattr__(batch, "positions", places[order[first]].int())
        return batch

    with mock.patch.object(next_use_index.NextUseIndex, "know", careless):
        yield


@contextlib.contextmanager
def _forgetting_keeps_the_traces() -> Iterator[None]:
    forget = next_use_index.NextUseIndex.forget

    def half(self: Any) -> None:
        entries = self._map.slot_of_key.clone()
        forget(self)
        self._map.slot_of_key.copy_(entries)

    with mock.patch.object(next_use_index.NextUseIndex, "forget", half):
        yield


@contextlib.contextmanager
def _flush_cleans_batches_in_flight() -> Iterator[None]:
    flush = row_cache.RowCache.flush

    def hasty(self: Any) -> None:
        flush(self)
        self.state.clean_through = self._in_flight.newest

    with mock.patch.object(row_cache.RowCache, "flush", hasty):
        yield


@contextlib.contextmanager
def _evicted_keys_stay_mapped() -> Iterator[None]:
    with mock.patch.object(slot_map.SlotMap, "unbind", return_value=None):
        yield


@contextlib.contextmanager
def _counts_are_lost() -> Iterator[None]:
    with mock.patch.object(scores.LfuScores, "evict", return_value=None):
        yield


@contextlib.contextmanager
def _every_lookup_counts_as_a_hit() -> Iterator[None]:
    find = slot_map.SlotMap.find

    def repeated(self: Any, keys: Tensor, batch: int) -> Any:
        slots, _, missed = find(self, keys, batch)
        return slots, slots != 0, missed

    with mock.patch.object(slot_map.SlotMap, "find", repeated):
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


_Faults = dict[str, Callable[[], contextlib.AbstractContextManager[None]]]

FAULTS: _Faults = {
    name.removeprefix("_"): fault for name, fault in list(globals().items()) if hasattr(fault, "__wrapped__")
}
# Those that lose no row, but evict the wrong ones.
FAULTS_OF_CHOICE: _Faults = {
    name: FAULTS.pop(name)
    for name in (
        "slots_of_batches_in_flight_are_not_offered",
        "rows_used_again_are_not_offered",
        "rows_that_become_known_are_skipped",
        "known_uses_do_not_matter",
    )
}
