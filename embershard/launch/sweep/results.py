"""The results of all runs of a sweep, as one table in a Parquet and a CSV file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv, parquet

from embershard.decoding import flat, toml
from embershard.launch.sweep.outcomes import Outcome, read_outcomes, read_result
from embershard.whole_file import whole_file

_LEFT_OUT = {"versions", "changes", "plan", "world_size"}


def write_results(sweep: Path) -> pa.Table:
    """Write `results.parquet` and `results.csv` into a sweep's folder: a row for each run that ended.

    The columns are what the sweep varies, by the settings' names; how the run ended; and every number of its
    result.json, with names that begin with "result.": `cache.device_bytes` is asked for, `result.cache.device_bytes`
    was used. A list is text, as in the sweep's file: CSV files have no lists, and Arrow groups by none.
    """
    rows = [_row(sweep, outcome) for outcome in read_outcomes(sweep)]
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.table({name: _column([row.get(name) for row in rows]) for name in names})
    for name, write in (("results.parquet", parquet.write_table), ("results.csv", csv.write_csv)):
        with whole_file(sweep / name) as partial:
            write(table, partial)
    return table


def _row(sweep: Path, outcome: Outcome) -> dict[str, Any]:
    values = dataclasses.asdict(outcome)
    varied = {key: toml(value) if isinstance(value, list) else value for key, value in values.pop("varied").items()}
    result = flat({key: value for key, value in read_result(sweep, outcome.name).items() if key not in _LEFT_OUT})
    return {**varied, **values, **{f"result.{key}": each for key, each in result.items() if _is_number(key, each)}}


def _is_number(key: str, value: Any) -> bool:
    """Return whether a value of result.json is a column: no list, and not of one table."""
    return not isinstance(value, list) and "tables" not in key.split(".")


def _column(values: list[Any]) -> pa.Array:
    """Return a column; values of several types become text."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array([None if value is None else str(value) for value in values])
