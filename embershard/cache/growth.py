"""Growth of a cache that is too small for one batch."""

from __future__ import annotations

import warnings

from embershard.errors import CacheOverflowError

_LEAST_SHARE = 0.25  # a cache grows by what is missing, and by at least this share of its slots


class CacheGrowthWarning(UserWarning):
    """One batch needed more rows than the cache had slots, so the cache took more device memory."""


def grown_slots(
    pool: str,
    num_slots: int,
    num_missing: int,
    num_rows: int,
    slot_bytes: int,
    batch: int,
    num_in_flight: int,
    grows: bool,
) -> int:
    """Return the number of slots to grow to, and warn.

    Args:
        pool: name of the pool, for messages.
        num_slots: slots that there are.
        num_missing: slots that `batch` lacks.
        num_rows: rows of the pool; more slots are never needed.
        slot_bytes: device memory of one slot.
        batch: number of the batch that does not fit.
        num_in_flight: earlier batches that wait for their backward.
        grows: False if the settings forbid growth.

    Raises:
        CacheOverflowError: growth is forbidden, or batches in flight hold slots of the present size.
    """
    needed_slots = num_slots + num_missing
    needed = f"batch {batch} and {num_in_flight} in flight need {needed_slots} slots at once, there are {num_slots}"
    advice = "set a larger cache.ratio or cache.device_bytes, or a smaller batch"
    if not grows:
        raise CacheOverflowError(f"{pool}: {needed}; {advice}")
    if num_in_flight:
        raise CacheOverflowError(
            f"{pool}: {needed}, and the cache cannot grow while {num_in_flight} earlier batches wait for "
            f"their backward; run each backward before the next forward, or {advice}"
        )
    grown = min(max(needed_slots, num_slots + int(num_slots * _LEAST_SHARE)), num_rows)
    warnings.warn(
        f"{pool}: {needed}; the cache grows to {grown} slots "
        f"({(grown - num_slots) * slot_bytes / 1e6:.1f} MB more device memory). To avoid it {advice}",
        CacheGrowthWarning,
        stacklevel=3,
    )
    return grown
