"""Rows that a conversion leaves out: counted, and listed in a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from embershard.data.block import BadRow, short
from embershard.data.sources.table.cells import read_cells
from embershard.data.sources.table.survey import FORMS
from embershard.data.sources.table.whole_columns import WholeColumns
from embershard.errors import DataError, naming_file

_MOST_LISTED = 10_000


class SkippedRows:
    """Reads the rows of text files, but for those that are none, or have a cell that is not of its column's type.

    Attributes:
        num_bad: rows left out; of all `num_rows`.
        path: the list, one JSON object to a line with the keys file, row, column and problem; made with the first.
    """

    def __init__(self, path: Path, allowed: float) -> None:
        self.path, self.num_bad, self.num_rows, self._allowed = path, 0, 0, allowed
        self._listed: list[BadRow] = []

    def batches(self, file: WholeColumns, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        """Yield the good rows of a file."""
        no_rows: list[int] = []

        def skip(row: Any) -> str:
            no_rows.append(row.number)
            self._add(file, row.number, "", f"has {row.actual_columns} columns; needed {row.expected_columns}")
            return "skip"

        first = 1 + (not file.form.columns)
        for batch in file.batches(on_bad=skip):
            cuts = np.asarray(no_rows, np.int64) - np.arange(len(no_rows))
            numbers = np.arange(first, first + len(batch))
            numbers += np.searchsorted(cuts, numbers, "right")
            is_good, columns = np.ones(len(batch), np.bool_), []
            for name, texts in zip(batch.schema.names, batch.columns, strict=True):
                form = FORMS.get(types[name])
                values, is_wrong = (texts, ~is_good & False) if form is None else read_cells(texts, [form])
                for row in np.flatnonzero(is_wrong & is_good).tolist():
                    problem = f"{name}={short(texts[row].as_py())}: needed {types[name]}, or nothing"
                    self._add(file, int(numbers[row]), name, problem)
                is_good &= ~is_wrong
                columns.append(values)
            first += len(batch)
            self.num_rows += len(batch)
            yield pa.RecordBatch.from_arrays(columns, names=batch.schema.names).filter(pa.array(is_good))
        self.num_rows += len(no_rows)

    def _add(self, file: WholeColumns, row: int, column: str, problem: str) -> None:
        self.num_bad += 1
        if len(self._listed) < _MOST_LISTED:
            self._listed.append(BadRow(file.file.path, row, column, problem))

    def finish(self) -> None:
        """Write the list.

        Raises:
            DataError: more rows are bad than the share that is allowed.
        """
        if not self._listed:
            return
        with naming_file(self.path), self.path.open("w", encoding="utf-8") as list_file:
            for row in self._listed:
                found = {"file": str(row.path), "row": row.row, "column": row.column, "problem": row.problem}
                list_file.write(f"{json.dumps(found)}\n")
        if self.num_bad > self._allowed * self.num_rows:
            raise DataError(
                f"{self.num_bad:,} of {self.num_rows:,} rows are bad, --bad-rows {self._allowed:g} allows "
                f"{self._allowed:.3%}: {self._listed[0]}. They are listed in {self.path}"
            )
