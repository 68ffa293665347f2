"""Growth of a cache that is too small for one batch."""

from __future__ import annotations

import warnings

from embershard.cache.config import Overflow
from embershard.cache.tickets import InFlight
from embershard.errors import CacheOverflowError
from embershard.units import size

_LEAST_SHARE = 0.25  # a cache grows by what is missing, and by at least this share of its slots


class CacheGrowthWarning(UserWarning):
    """One batch needed more rows than the cache had slots, so the cache took more device memory."""


def grown_slots(
    pool: str, num_slots: int, num_missing: int, num_rows: int, slot_bytes: int, in_flight: InFlight, overflow: Overflow
) -> int:
    """Return the number of slots to grow to so that the newest batch fits, and warn.

    Raises:
        CacheOverflowError: growth is forbidden, or other batches are in flight.
    """
    batch, pinned, needed_slots = in_flight.newest, len(in_flight), num_slots + num_missing
    needed = f"batch {batch} and {pinned} in flight need {needed_slots} slots at once, there are {num_slots}"
    advice = "set a larger cache.ratio or cache.device_bytes, or a smaller batch"
    if overflow == "raise":
        raise CacheOverflowError(f"{pool}: {needed}; {advice}")
    if pinned:
        raise CacheOverflowError(
            f"{pool}: {needed}, and the cache cannot grow while {pinned} earlier batches wait for "
            f"their backward; run each backward before the next forward, or {advice}"
        )
    grown = min(max(needed_slots, num_slots + int(num_slots * _LEAST_SHARE)), num_rows)
    warnings.warn(
        f"{pool}: {needed}; the cache grows to {grown} slots "
        f"({size((grown - num_slots) * slot_bytes)} more device memory). To avoid it {advice}",
        CacheGrowthWarning,
        stacklevel=3,
    )
    return grown
