"""A pool's counters as one value per table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embershard.cache.statistics import Counter, TableStats, apportion

if TYPE_CHECKING:
    from embershard.cache.row_cache import RowCache


def table_stats(cache: RowCache) -> list[TableStats]:
    """Totals per table of ``cache``; the sum over tables is the pool's."""
    values = cache.counters.values.tolist()
    rows = cache.host.rows_per_table
    slot_map = cache.planner.map
    held = [row[Counter.FILLS] + row[Counter.PRELOADS] - row[Counter.EVICTIONS] for row in values]
    absent = [all_rows - own for all_rows, own in zip(rows, held, strict=True)]
    slots = [own + free for own, free in zip(held, apportion(slot_map.num_free, absent), strict=True)]
    map_bytes = apportion(slot_map.entry_bytes, rows)
    slot_bytes = apportion(cache.device_bytes - slot_map.entry_bytes, slots)
    host_bytes = apportion(cache.host.host_bytes + cache.planner.scores.host_bytes, rows)
    lookups = [row[Counter.LOOKUPS] for row in values]
    shares = lookups if any(lookups) else [1] * len(lookups)
    return [
        TableStats(
            table=table,
            rows=rows[t],
            slots=slots[t],
            lookups=(row := values[t])[Counter.LOOKUPS],
            unique_ids=row[Counter.HITS_UNIQUE] + row[Counter.FILLS],
            hits_unique=row[Counter.HITS_UNIQUE],
            hits_lookups=row[Counter.LOOKUPS] - row[Counter.MISSED_LOOKUPS],
            fills=row[Counter.FILLS] + row[Counter.PRELOADS],
            critical_path_fills=row[Counter.CRITICAL_PATH_FILLS],
            write_backs=row[Counter.WRITE_BACKS],
            evictions=row[Counter.EVICTIONS],
            overflow_growths=row[Counter.OVERFLOW_GROWTHS],
            bytes_to_device=(row[Counter.FILLS] + row[Counter.PRELOADS]) * cache.host.row_bytes,
            bytes_to_host=row[Counter.WRITE_BACKS] * cache.host.row_bytes,
            device_bytes=map_bytes[t] + slot_bytes[t],
            host_bytes=host_bytes[t],
            seconds=cache.counters.seconds * shares[t] / sum(shares),
            stall_seconds=cache.stall_seconds * shares[t] / sum(shares),
        )
        for t, table in enumerate(cache.tables)
    ]
