"""`full_rows_of`: the rows of a table that stay float32 where the host tier has int8."""

from __future__ import annotations

import numpy as np

from embershard.cache.homes.small_sizes import num_full_rows
from embershard.frequency.profile import FrequencyProfile
from embershard.frequency.statistics import Ints


def full_rows_of(table: str, num_rows: int, share: float, profile: FrequencyProfile | None) -> Ints:
    """Return the full rows of a whole table, ascending: those that the profile counted most; of equal ones the first.

    A function of the table and the profile alone, so that no plan, rank or cache matters.

    >>> import torch
    >>> profile = FrequencyProfile.count([{"clicks": torch.tensor([7, 9, 9, 5])}], {"clicks": 10_000})
    >>> full_rows_of("clicks", 10_000, share=0.0002, profile=profile).tolist()
    [5, 9]
    """
    count = num_full_rows(num_rows, share)
    if count == num_rows:
        return np.arange(num_rows)
    if not count:
        return np.empty(0, np.int64)
    assert profile is not None, "full rows are chosen by a profile"
    return np.sort(profile.shard(table, num_rows, 0, num_rows).top(count))
