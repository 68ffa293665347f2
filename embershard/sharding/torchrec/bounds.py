"""Checks of ids before the input all-to-all, on the rank that read them, where the user's names still apply.

After the all-to-all it is too late: FBGEMM trains row 0 for an id that is too large (with one warning), and row-wise
sharding sends such an id to some rank as some row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.cache import loops
from embershard.errors import IdOutOfRangeError

_UNCHECKED = 2**62


class _TableConfig(Protocol):
    name: str
    num_embeddings: int
    feature_names: list[str]


def rows_by_feature(configs: Sequence[_TableConfig]) -> dict[str, tuple[str, int]]:
    """Return for each feature the smallest table that it looks into: name and rows."""
    smallest: dict[str, tuple[str, int]] = {}
    for config in configs:
        for feature in config.feature_names:
            if feature not in smallest or config.num_embeddings < smallest[feature][1]:
                smallest[feature] = (config.name, config.num_embeddings)
    return smallest


def check_bounds(features: KeyedJaggedTensor, rows: Mapping[str, tuple[str, int]]) -> None:
    """Check that every id is a row of its table. Features that no table uses are not checked.

    >>> rows = {"click": ("clicks", 10)}
    >>> check_bounds(KeyedJaggedTensor(["click"], torch.tensor([3, 10]), lengths=torch.tensor([1, 1])), rows)
    Traceback (most recent call last):
    embershard.errors.IdOutOfRangeError: ...table 'clicks', feature 'click': id 10 at position 1 of the batch...

    Raises:
        IdOutOfRangeError: naming table, feature, position and id of the first out-of-range id.
    """
    values = features.values()
    if values.numel() == 0:
        return
    limits = [rows[key][1] if key in rows else _UNCHECKED for key in features.keys()]  # noqa: SIM118
    lengths = features.length_per_key()
    if values.is_cpu:
        counts, ends = np.array(lengths, np.int64), np.array(limits, np.int64)
        inside = loops.are_rows(values.long().contiguous().numpy(), counts, ends)
    else:
        lengths = torch.tensor(lengths, device=values.device)
        limit_of_id = torch.tensor(limits, device=values.device).repeat_interleave(lengths, output_size=values.numel())
        inside = not bool(((values < 0) | (values >= limit_of_id)).any())
    if not inside:
        _raise_first(features, rows)


def _raise_first(features: KeyedJaggedTensor, rows: Mapping[str, tuple[str, int]]) -> None:
    start = 0
    for key, length in zip(features.keys(), features.length_per_key(), strict=True):
        ids = features.values()[start : start + length]
        start += length
        if key not in rows:
            continue
        table, num_rows = rows[key]
        bad = ((ids < 0) | (ids >= num_rows)).nonzero().flatten()
        if bad.numel():
            position = int(bad[0])
            bag_ends = features[key].lengths().cumsum(0)
            sample = int(torch.searchsorted(bag_ends, position, right=True))
            others = f", nor are {bad.numel() - 1} more" if bad.numel() > 1 else ""
            rank = f"rank {dist.get_rank()}, " if dist.is_initialized() else ""
            raise IdOutOfRangeError(
                f"{rank}table {table!r}, feature {key!r}: id {int(ids[position])} at position {position} "
                f"of the batch (sample {sample}) is not in [0, {num_rows}){others}. "
                "Map ids to rows when reading (modulo or hash), or give the table more rows"
            )
