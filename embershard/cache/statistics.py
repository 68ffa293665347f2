"""Counts of what a cache did. Per table they take a few small tensor operations a batch, and are read rarely."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from embershard.cache import loops
from embershard.cache.planner import CachePlan
from embershard.cache.rows import memory

R = TypeVar("R", bound="CacheReport")


@dataclass(frozen=True)
class CacheReport:
    """Counts of what a cache did: totals, or means per step. Reports of one kind can be added and scaled.

    >>> early = CacheReport(lookups=100, unique_ids=40, hits_unique=20, hits_lookups=70, fills=20, write_backs=0)
    >>> early.hit_rate_unique, (early + early).hit_rate_lookups, (early - early.scaled(0.5)).fills
    (0.5, 0.7, 10.0)

    Attributes:
        lookups: ids of the batches.
        unique_ids: distinct ids of each batch, added up.
        hits_unique: those of `unique_ids` found on the device.
        hits_lookups: those of `lookups` found on the device.
        fills: rows copied to the device.
        write_backs: rows copied to the host.
    """

    LABELS: ClassVar[frozenset[str]] = frozenset()  # fields that say whose counts these are

    lookups: float
    unique_ids: float
    hits_unique: float
    hits_lookups: float
    fills: float
    write_backs: float

    @property
    def hit_rate_unique(self) -> float | None:
        """Share of a batch's distinct ids found on the device; None before the first."""
        return self.hits_unique / self.unique_ids if self.unique_ids else None

    @property
    def hit_rate_lookups(self) -> float | None:
        """Share of lookups found on the device; None before the first."""
        return self.hits_lookups / self.lookups if self.lookups else None

    def __add__(self: R, other: R) -> R:
        return self._with(lambda name: getattr(self, name) + getattr(other, name))

    def __sub__(self: R, other: R) -> R:
        return self._with(lambda name: getattr(self, name) - getattr(other, name))

    def scaled(self: R, factor: float) -> R:
        """Multiply every count by `factor`."""
        return self._with(lambda name: getattr(self, name) * factor)

    @staticmethod
    def total(reports: Iterable[CacheReport]) -> CacheReport:
        """Add up the counts of any reports."""
        found = list(reports)
        names = [field.name for field in dataclasses.fields(CacheReport)]
        return CacheReport(*(sum(getattr(report, name) for report in found) for name in names))

    @property
    def counts(self) -> CacheReport:
        """The counts alone, without what a subclass adds."""
        return CacheReport(*(getattr(self, field.name) for field in dataclasses.fields(CacheReport)))

    def _with(self: R, value: Callable[[str], float]) -> R:
        names = [field.name for field in dataclasses.fields(self) if field.name not in self.LABELS]
        return dataclasses.replace(self, **{name: value(name) for name in names})


@dataclass(frozen=True)
class TableStats(CacheReport):
    """Totals of one table on one rank since the cache was made: the counts of `CacheReport` and the following.

    They add up over tables to the rank's totals. Resources that a pool's tables share are divided among them: free
    slots by the rows not cached, device memory by slots and rows, seconds by lookups.

    Attributes:
        table: name of the table.
        rows: rows of the table on this rank.
        slots: slots that hold the table's rows, and its share of the free slots.
        critical_path_fills: fills that a training step waited for.
        evictions: rows evicted.
        overflow_growths: times the pool grew for one batch; counted for the table with most misses.
        bytes_to_device, bytes_to_host: bytes of the fills and of the write-backs.
        device_bytes: device memory of slots, optimizer states, maps and scores.
        host_bytes: host memory of rows, optimizer states and scores.
        seconds: host time of planning and copies.
        stall_seconds: time that training steps waited for rows.
        module: path of the table's sharded module in the model without its wrappers: two modules may have tables of
            the same name.

    >>> counts = dict(lookups=5, unique_ids=4, hits_unique=3, hits_lookups=4, fills=1, write_backs=0, evictions=0)
    >>> memory = dict(slots=20, bytes_to_device=64, bytes_to_host=0, device_bytes=1600, host_bytes=6400)
    >>> times = dict(critical_path_fills=1, overflow_growths=0, seconds=0.1, stall_seconds=0.1)
    >>> TableStats(table="users", rows=100, **counts, **memory, **times).hit_rate_unique
    0.75
    """

    LABELS = frozenset({"table", "rows", "module"})

    table: str
    rows: int
    slots: int
    critical_path_fills: int
    evictions: int
    overflow_growths: int
    bytes_to_device: int
    bytes_to_host: int
    device_bytes: int
    host_bytes: int
    seconds: float
    stall_seconds: float
    module: str = ""


class Counter(IntEnum):
    """Columns of `CacheCounters.values`."""

    LOOKUPS = 0
    MISSED_LOOKUPS = 1
    HITS_UNIQUE = 2
    FILLS = 3
    CRITICAL_PATH_FILLS = 4
    WRITE_BACKS = 5
    EVICTIONS = 6
    PRELOADS = 7
    OVERFLOW_GROWTHS = 8


class CacheCounters:
    """Counters of one pool.

    Attributes:
        values: int64 [T, len(Counter)] on the planning device.
        seconds: host time of planning and copies.
        stall_seconds: time that training steps waited for rows.
    """

    def __init__(self, row_offsets: Sequence[int], table_of_feature: Sequence[int], device: torch.device) -> None:
        self._starts = torch.tensor(row_offsets[1:], dtype=torch.int64, device=device)
        self._ends = torch.tensor([*row_offsets[1:], 2**62], dtype=torch.int64, device=device)
        self._table_of_feature = torch.tensor(table_of_feature, dtype=torch.int64, device=device)
        self._num_tables = len(row_offsets)
        self.values = torch.zeros(self._num_tables, len(Counter), dtype=torch.int64, device=device)
        tensors = (self.values, self._table_of_feature, self._ends)
        self._arrays = tuple(memory.array_of(tensor) for tensor in tensors)  # for compiled loops
        self.seconds = 0.0
        self.stall_seconds = 0.0

    def add_plan(self, plan: CachePlan, feature_lengths: Tensor, critical_path: bool) -> None:
        """Count a planned batch; `feature_lengths` int64 [F] splits its N ids by feature."""
        parts = (plan.first_hits, plan.missed, plan.fill_keys, plan.evicted_keys, plan.write_back_keys)
        if not self.values.is_cpu:
            from embershard.cache.gpu.counters import count_plan

            count_plan(self.values, self._table_of_feature, self._ends, feature_lengths, parts, critical_path)
            return
        lengths, num_ids = feature_lengths.contiguous().numpy(), plan.slots.numel()
        assert lengths.size == self._table_of_feature.numel(), f"{lengths.size} features"
        assert lengths.sum() == num_ids, f"{lengths.sum()} ids in {lengths.size} features, {num_ids} ids in the batch"
        values, table_of_feature, ends = self._arrays
        hits, missed, filled, evicted, written = (part.numpy() for part in parts)
        rows = (filled, evicted, written)
        loops.count_plan(loops.Counters(values), table_of_feature, lengths, ends, hits, missed, *rows, critical_path)

    @contextmanager
    def timed(self, critical_path: bool = False) -> Iterator[None]:
        """Return a context whose host time is counted, as `add_seconds` does."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add_seconds(critical_path, time.perf_counter() - started)

    def add_seconds(self, critical_path: bool, seconds: float) -> None:
        """Count host time of a batch's plan and copies, for which the training waits if it is on the critical path."""
        self.seconds += seconds
        self.stall_seconds += seconds * critical_path

    def add_rows(self, counter: Counter, keys: Tensor) -> None:
        """Add one per key to its table's `counter`."""
        if keys.numel():
            self.values[:, counter] += self._by_table(keys)

    def add_growth(self, miss_keys: Tensor) -> None:
        """Count a growth of the pool for the table with most of the batch's misses."""
        self.values[self._by_table(miss_keys).argmax(), Counter.OVERFLOW_GROWTHS] += 1

    def _by_table(self, keys: Tensor) -> Tensor:
        tables = torch.bucketize(keys, self._starts, right=True)
        if tables.is_cpu:
            return torch.bincount(tables, minlength=self._num_tables)
        # On a GPU, bincount makes the host wait for the largest number.
        return tables.new_zeros(self._num_tables).index_add_(0, tables, torch.ones_like(tables))


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Split `total` into whole parts in proportion to `weights`; the parts add up to `total`."""
    whole = sum(weights)
    if whole == 0:
        return [total, *[0] * (len(weights) - 1)]
    bounds = [total * running // whole for running in itertools.accumulate(weights, initial=0)]
    return [high - low for low, high in itertools.pairwise(bounds)]


def table_stats(
    tables: Sequence[str],
    rows: Sequence[int],
    counters: CacheCounters,
    *,
    free_slots: int,
    map_bytes: int,
    slot_bytes: int,
    host_bytes: int,
    row_bytes: int,
) -> list[TableStats]:
    """Return the totals of a pool's tables, of `rows` each. `slot_bytes` is all device memory but that of the map over
    the rows; `row_bytes` move with each row."""
    columns = counters.values.T.tolist()  # in the order of `Counter`
    lookups, missed, hits, fills, critical, write_backs, evictions, preloads, growths = columns
    filled = [sum(pair) for pair in zip(fills, preloads, strict=True)]
    held = [come - gone for come, gone in zip(filled, evictions, strict=True)]
    absent = [all_rows - own for all_rows, own in zip(rows, held, strict=True)]
    slots = [own + free for own, free in zip(held, apportion(free_slots, absent), strict=True)]
    device_shares = zip(apportion(map_bytes, rows), apportion(slot_bytes, slots), strict=True)
    device_bytes = [of_rows + of_slots for of_rows, of_slots in device_shares]
    host_shares = apportion(host_bytes, rows)
    shares = lookups if any(lookups) else [1] * len(lookups)
    return [
        TableStats(
            table=table,
            rows=rows[t],
            slots=slots[t],
            lookups=lookups[t],
            unique_ids=hits[t] + fills[t],
            hits_unique=hits[t],
            hits_lookups=lookups[t] - missed[t],
            fills=filled[t],
            critical_path_fills=critical[t],
            write_backs=write_backs[t],
            evictions=evictions[t],
            overflow_growths=growths[t],
            bytes_to_device=filled[t] * row_bytes,
            bytes_to_host=write_backs[t] * row_bytes,
            device_bytes=device_bytes[t],
            host_bytes=host_shares[t],
            seconds=counters.seconds * shares[t] / sum(shares),
            stall_seconds=counters.stall_seconds * shares[t] / sum(shares),
        )
        for t, table in enumerate(tables)
    ]
