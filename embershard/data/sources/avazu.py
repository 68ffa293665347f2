"""Avazu's click logs: CSV with a header, id, click, hour and 21 categoricals, whose values are hashed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embershard.data.config import DataConfig
from embershard.data.hashing import Ids, map_ids, text_keys
from embershard.data.schema import Schema, SparseFeature, Target
from embershard.data.sources.held_out import Share, alone
from embershard.data.sources.text import LineFormat, LineSource, joined_cells

HASHED = (
    *("C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"),
    *("device_id", "device_ip", "device_model", "device_type", "device_conn_type"),
    *(f"C{number}" for number in range(14, 22)),
)
TIMES = (SparseFeature("hour_of_day", 25), SparseFeature("weekday", 8))
#: Longest value, so that a damaged file cannot take much memory. Avazu's have 8 bytes.
MOST_BYTES = 64
_FORMAT = LineFormat(
    (",", "comma"), ("id", "click", "hour", *HASHED), ("click",), "id, click, hour, 21 categoricals", has_header=True
)
_YYMMDDHH = 8
_JANUARY_2000 = np.datetime64("2000-01", "M").astype(np.int64)
_MONDAY = np.datetime64("1969-12-29", "D").astype(np.int64)


class AvazuSource(LineSource):
    """Avazu CSV files, as `train.csv` of the competition; see `AvazuConfig`.

    `id` is not read. `hour` becomes hour_of_day and weekday: as it stands, no held-out hour would occur in training.
    Models need a dense feature, and Avazu has none: `constant` is 1 in every sample. Row 0 of every table stands for a
    missing value.
    """

    def __init__(self, config: DataConfig, *, share: Share = alone) -> None:
        self._num_rows = np.array(config.avazu.rows_per_table)[:, None]
        super().__init__(config, self.schema_of(config), _FORMAT, share)

    @staticmethod
    def schema_of(config: DataConfig) -> Schema:
        hashed = map(SparseFeature, HASHED, config.avazu.rows_per_table)
        return Schema(("constant",), (*TIMES, *hashed), target=Target(("click",)))

    def parse_cells(self, table: pa.Table) -> tuple[NDArray[np.float32], Sequence[Ids]]:
        text, lengths = joined_cells(table, HASHED)
        if lengths.max(initial=0) > MOST_BYTES:
            raise ValueError(f"a value has more than {MOST_BYTES} bytes")
        rows = map_ids(text_keys(text, lengths).reshape(len(HASHED), -1), self._num_rows, "modulo")
        rows[lengths.reshape(rows.shape) == 0] = 0
        times = time_rows(*joined_cells(table, ["hour"]))
        return np.ones((table.num_rows, 1), np.float32), (*times, *rows)

    def cell_problem(self, name: str, cell: str) -> str | None:
        text = cell.encode()
        if name in HASHED:
            return None if len(text) <= MOST_BYTES else f"needed at most {MOST_BYTES} bytes"
        if name == "hour":
            try:
                time_rows(np.frombuffer(text, np.uint8), np.array([len(text)], np.int32))
            except ValueError:
                return "needed YYMMDDHH, a date and an hour, or nothing"
        return None


def time_rows(text: NDArray[np.uint8], lengths: NDArray[np.int32]) -> tuple[Ids, Ids]:
    """Return the rows [n] of hour_of_day (1 + hour) and of weekday (1: Monday) of hours as YYMMDDHH; 0 for none.

    >>> rows = time_rows(np.frombuffer(b"14102123", np.uint8), np.array([8, 0]))  # Tuesday, 2014-10-21, 23 h
    >>> [each.tolist() for each in rows]
    [[24, 0], [2, 0]]

    Args:
        text: the bytes of all hours, one after another.
        lengths: [n], bytes of each.

    Raises:
        ValueError: a text is not eight digits that are a date and an hour.
    """
    if not np.isin(lengths, (0, _YYMMDDHH)).all():
        raise ValueError("an hour has not 8 digits")
    is_there = lengths > 0
    digits = text.reshape(-1, 4, 2).astype(np.int64) - ord("0")
    year, month, day, hour = (digits @ [10, 1]).T
    months = (_JANUARY_2000 + 12 * year + month - 1).astype("datetime64[M]")
    days = months.astype("datetime64[D]") + (day - 1)
    is_date = (month >= 1) & (month <= 12) & (day >= 1) & (days.astype("datetime64[M]") == months) & (hour <= 23)
    if ((digits < 0) | (digits > 9)).any() or not is_date.all():
        raise ValueError("an hour is no date and hour")
    hours, weekdays = np.zeros((2, len(lengths)), np.int64)
    hours[is_there] = 1 + hour
    weekdays[is_there] = 1 + (days.astype(np.int64) - _MONDAY) % 7
    return hours, weekdays
