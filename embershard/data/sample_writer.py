"""Writes samples that a program has as Parquet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from embershard.errors import DataError
from embershard.whole_file import whole_file


def write_samples(samples: Iterable[Mapping[str, Any]], path: str | Path, group_rows: int = 16_384) -> int:
    """Write dicts as the rows of a new Parquet file, and return their number. Memory does not grow with it.

    A value is a number, a text, a bool, a datetime, a list of them, or None. The first `group_rows` samples decide the
    columns and their types.

    >>> write_samples([{"click": 1, "user": "a"}, {"click": 0, "user": None}], "clicks.parquet")
    2

    Raises:
        DataError: there is no sample, or a later one has a value of another type, or a column that the first have not.
    """
    rows, schema, count = iter(samples), None, 0
    with whole_file(Path(path)) as partial:
        writer = None
        while group := [dict(row) for row in islice(rows, group_rows)]:
            try:
                table = pa.Table.from_pylist(group, schema)
            except pa.ArrowException as error:
                raise DataError(f"samples {count:,} to {count + len(group) - 1:,}: {error}") from None
            if schema is None:
                schema = table.schema
                writer = pq.ParquetWriter(partial, schema, write_page_checksum=True)
            if new := sorted({name for row in group for name in row} - set(schema.names)):
                raise DataError(
                    f"a sample has {new[0]!r}, which the first {group_rows:,} have not; needed the same keys"
                )
            assert writer is not None
            writer.write_table(table)
            count += len(group)
        if writer is None:
            raise DataError("there is no sample to write")
        writer.close()
    return count
