"""The results of all runs of a sweep, as one table in a Parquet and a CSV file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv, parquet

from embershard.errors import naming_file
from embershard.launch.sweep.run import Outcome, read_outcomes, run_folder

_LEFT_OUT = {"versions", "changes", "plan", "world_size"}


def write_results(sweep: Path) -> pa.Table:
    """Write `results.parquet` and `results.csv` into a sweep's folder: a row for each run that ended.

    The columns are what the sweep varies, how the run ended, and every number of its result.json.
    """
    rows = [_row(sweep, outcome) for outcome in read_outcomes(sweep)]
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.table({name: _column([row.get(name) for row in rows]) for name in names})
    for name, write in (("results.parquet", parquet.write_table), ("results.csv", csv.write_csv)):
        partial = sweep / f"{name}.partial"
        with naming_file(sweep / name):
            write(table, partial)
            os.replace(partial, sweep / name)
    return table


def _row(sweep: Path, outcome: Outcome) -> dict[str, Any]:
    values = dataclasses.asdict(outcome)
    varied = values.pop("varied")
    try:
        result = json.loads((run_folder(sweep, outcome.name) / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        result = {}
    kept = {key: value for key, value in result.items() if key not in _LEFT_OUT}
    return {**varied, **values, **_numbers(kept)}


def _numbers(values: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Return nested values by `section.key`, without lists and what is per table."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            if key != "tables":
                found.update(_numbers(value, f"{at}{key}."))
        elif not isinstance(value, list):
            found[f"{at}{key}"] = value
    return found


def _column(values: list[Any]) -> pa.Array:
    """Return a column; values of several types become text."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array([None if value is None else str(value) for value in values])
