"""What the caches of a run did, as its result has it: of all ranks, each rank, each table; and how readers see it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from embershard.units import Row, ShownTable, number, size

if TYPE_CHECKING:  # reports of runs load no torch
    from embershard.cache.statistics import TableStats

T = TypeVar("T", bound="CacheTotals")
_MOST_RANKS = 16


@dataclass(frozen=True, kw_only=True)
class CacheTotals:
    """What the caches of a table, a rank or all ranks did, since the run was last resumed.

    Attributes:
        rows, slots, device_bytes, host_bytes: at the end. `device_bytes` are of the caches alone: slots, optimizer
            states, maps, and copies of hot rows, as a plan's `RankPrediction.cache_device_bytes`. Tables without a
            cache, dense layers, activations and buffers are not among them; `host_bytes` are rows and their scores.
        hit_rate_unique, hit_rate_lookups: shares in 0..1; None without lookups.
        overflow_growths: times that a cache grew for a batch that did not fit.
        critical_path_fills: rows that a step waited for.
        seconds: of the host, for planning and copies; `stall_seconds` in which training waited for rows.
    """

    rows: int
    slots: int
    hit_rate_unique: float | None
    hit_rate_lookups: float | None
    device_bytes: int
    host_bytes: int
    fills: int
    write_backs: int
    bytes_to_device: int
    bytes_to_host: int
    evictions: int
    overflow_growths: int
    critical_path_fills: int
    hits_unique: int
    unique_ids: int
    hits_lookups: int
    lookups: int
    seconds: float
    stall_seconds: float

    @classmethod
    def of(cls: type[T], shards: Sequence[TableStats], hot_bytes: int = 0, hot_lookups: int = 0, **more: Any) -> T:
        """Return the totals of tables, or of their shards.

        Args:
            hot_bytes, hot_lookups: of rows that every rank has: their bytes on the device, and lookups, all of them
                hits.
            more: entries of `cls` beside these.
        """
        names = [each.name for each in fields(CacheTotals) if not each.name.startswith("hit_rate")]
        sums = {name: sum(getattr(shard, name) for shard in shards) for name in names}
        sums["device_bytes"] += hot_bytes
        sums["lookups"] += hot_lookups
        sums["hits_lookups"] += hot_lookups
        if issubclass(cls, RankCaches | RunCaches):
            more |= {"hot_rows_bytes": hot_bytes, "hot_lookups": hot_lookups}
        return cls(
            **sums,
            hit_rate_unique=sums["hits_unique"] / sums["unique_ids"] if sums["unique_ids"] else None,
            hit_rate_lookups=sums["hits_lookups"] / sums["lookups"] if sums["lookups"] else None,
            **more,
        )


@dataclass(frozen=True, kw_only=True)
class PoolSize:
    """One cache of a rank: the tables that share its slots, and its size at the end."""

    tables: tuple[str, ...]
    slots: int
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, kw_only=True)
class RankCaches(CacheTotals):
    """All caches of a rank.

    Attributes:
        hot_rows_bytes, hot_lookups: of the rows that every rank has (`sharding.mode = "hot_cold"`); they count in the
            totals, and not in those of tables.
    """

    rank: int
    tables: dict[str, CacheTotals]
    pools: tuple[PoolSize, ...]
    hot_rows_bytes: int = 0
    hot_lookups: int = 0


@dataclass(frozen=True, kw_only=True)
class RunCaches(CacheTotals):
    """All caches of all ranks.

    Attributes:
        ratio: the setting; None where bytes or a plan gave the slots.
        hot_rows_bytes, hot_lookups: as in `RankCaches`.
    """

    ratio: float | None
    tables: dict[str, CacheTotals]
    ranks: tuple[RankCaches, ...]
    hot_rows_bytes: int = 0
    hot_lookups: int = 0

    def closing_rows(self, rows_elsewhere: int) -> Iterator[Row]:
        """Yield what the closing table says of them.

        Args:
            rows_elsewhere: that are on the device, and in no cache.
        """
        on_device = self.slots + rows_elsewhere
        moved = size(self.bytes_to_device + self.bytes_to_host)
        fullest = max((rank.device_bytes for rank in self.ranks), default=0)
        of_ranks = f"slots and maps of all ranks, {size(fullest)} on the fullest"
        share = f"{on_device / self.rows:.1%} of the embedding rows"
        yield "rows on device", f"{on_device:,} of {self.rows:,}", share
        yield "hit rate", number(self.hit_rate_lookups, ".1%"), "lookups whose row was on the device already"
        yield "rows moved", f"{self.fills + self.write_backs:,}", f"{moved} to and from the device"
        yield "evictions", f"{self.evictions:,}", "rows that left the device for other rows"
        yield "caches' memory", f"{size(self.device_bytes)} device", f"{of_ranks}; {size(self.host_bytes)} host"

    def by_rank_and_table(self, steps: int, top: int) -> Iterator[ShownTable]:
        """Yield a table of the ranks, and one of the `top` tables with most misses, with means over steps."""
        by_misses = sorted(self.tables.items(), key=lambda item: item[1].hits_lookups - item[1].lookups)
        title = "Tables, most misses first"
        if len(by_misses) > top:
            title = f"The {top} of {len(by_misses)} tables with most misses"
        ranks = ((str(each.rank), each) for each in self.ranks[:_MOST_RANKS])
        yield _table("Ranks", "rank", ranks, steps)
        yield _table(title, "table", by_misses[:top], steps)


def _table(title: str, what: str, shown: Iterable[tuple[str, CacheTotals]], steps: int) -> ShownTable:
    rows = [
        (
            name,
            f"{each.rows:,}",
            f"{each.slots:,}",
            number(each.hit_rate_lookups, ".2%"),
            number(each.hit_rate_unique, ".2%"),
            *(f"{n / steps:,.0f}" for n in (each.lookups - each.hits_lookups, each.fills, each.write_backs)),
            *(size(n / steps) for n in (each.bytes_to_device, each.bytes_to_host)),
            size(each.device_bytes),
            size(each.host_bytes),
        )
        for name, each in shown
    ]
    counts = ("misses", "fills", "write-backs", "to device", "to host")
    caption = (
        "rows, slots, caches (device memory of slots and maps) and host (rows and scores): at the end; the rest: means "
        "per step"
    )
    return ShownTable(
        title, (what,), ("rows", "slots", "hits", "unique hits", *counts, "caches", "host"), rows, caption
    )
