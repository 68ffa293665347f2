"""What `cache.host_dtype` means for sizes, and what a user is told about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from embershard.cache import CacheConfig
from embershard.cache.homes.small_sizes import SMALL_TABLE_ROWS, num_full_rows
from embershard.sharding.sizes import TableSize


def host_type(cache: CacheConfig, table: str, rows: int) -> dict[str, Any]:
    """Return what a `TableSize` has of rows that are small in host memory.

    >>> host_type(CacheConfig(host_dtype="int8"), "t_clicks", 1_000_000)
    {'host_dtype': 'int8', 'full_share': 0.01}
    """
    return {
        "host_dtype": cache.small_type_of(table) if cache.enabled else None,
        "full_share": num_full_rows(rows, cache.full_share) / max(1, rows),
    }


def host_type_notes(cache: CacheConfig, tables: Iterable[TableSize], predicts_gpu: bool = False) -> list[str]:
    """Return what to say about types of rows in host memory.

    >>> host_type_notes(CacheConfig(host_dtype="int8"), [TableSize("t_C1", 15, 16, host_dtype="int8", full_share=1.0)])
    ['cache.host_dtype = "int8" rounds no row and takes more memory than "fp32": no int8 table has more than 4,096 ...']

    Args:
        predicts_gpu: times on a GPU are predicted.
    """
    found = []
    if cache.rounds_rows and predicts_gpu:
        found.append(
            "cache.host_dtype: host memory, and bytes between it and the device, are those of small rows. The time to "
            "round them is not in the prediction: it was never measured on a GPU."
        )
    int8 = [table for table in tables if table.host_dtype == "int8"]
    if int8 and all(table.full_share >= 1 for table in int8):
        found.append(
            'cache.host_dtype = "int8" rounds no row and takes more memory than "fp32": no int8 table has more than '
            f'{SMALL_TABLE_ROWS:,} rows, and such tables stay full. Set "fp32", or cache.full_rows = 0 to round all '
            "rows."
        )
    return found


def as_in_slots(cache: CacheConfig) -> str:
    """Return the options that make rows in host memory what they are in slots.

    >>> as_in_slots(CacheConfig(host_dtype="fp16"))
    '--set cache.host_dtype=fp32'
    """
    own = "".join(f" --set cache.host_dtypes.{table}=fp32" for table in cache.host_dtypes)
    own += "" if cache.full_rows is None else " --set cache.full_rows=none"
    return f"--set cache.host_dtype=fp32{own}"
