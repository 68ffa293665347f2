"""Replays batches through two levels: slots on the device, places in host memory in front of a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

from embershard.planning.simulate.file_tier import FileTier, FileTraffic, Levels
from embershard.planning.simulate.stages import bare_cache, run_stages
from embershard.sharding.run_shape import ReplaySettings


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

    >>> import torch
    >>> few = [(torch.tensor([row]), torch.tensor([1])) for row in (0, 1, 2, 3, 0)]
    >>> levels = Levels(num_slots=1, num_places=2, rows_per_page=8, read_ahead=0)
    >>> found = replay_two_levels(few, [4], levels, ReplaySettings(lookahead=1, prefetch=1))
    >>> found.rows_drawn, found.rows_read, found.rows_written
    (4.0, 1.0, 3.0)
    """
    if settings.policy.warmup:
        raise ValueError("got a policy that fills the cache first, needed one without warm-up: places start empty")
    every, names = list(batches), [str(number) for number in range(len(rows))]
    tier = FileTier(levels, np.arange(sum(rows), dtype=np.int64) // levels.rows_per_page)
    cache = bare_cache(names, rows, levels.num_slots, settings, tier=tier)
    run_stages(cache, every.__getitem__, len(every), settings, tier=tier)
    return tier.traffic
