"""Columns of results: what is known with the label alone, or adds up to it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from embershard.data.sources.table.cells import FLOATS, read_cells
from embershard.data.sources.table.survey import ColumnSurvey
from embershard.extras.judging.suggest import LabelSuggestion, holds

_ZEROS = ["", "0", "0.0", "false", "False", "FALSE", "no", "No", "NO", "n", "N"]
_LEAST_RESULTS, _BY_CHANCE, _VALUES_OF_CLICKS = 20, 1e-3, 2
_EXACT, _MOST_ROUNDED, _LEAST_VALUES = 0.99, 1e-6, 20


def results_of(columns: Mapping[str, ColumnSurvey], label: ColumnSurvey, wanted: LabelSuggestion) -> dict[str, str]:
    """Return why columns are results, by name."""
    found = {name: why for name, each in columns.items() if (why := result_of(each, label, wanted))}
    return found | parts_of_label({name: each for name, each in columns.items() if name not in found}, label)


def parts_of_label(columns: Mapping[str, ColumnSurvey], label: ColumnSurvey) -> dict[str, str]:
    """Return the columns of numbers that in the first rows add up to the label, or are the label where others are taken
    off, and why they are results. A label of few values may be a sum by chance."""
    totals = _numbers(label)
    if totals is None or label.values.estimate < _LEAST_VALUES:
        return {}
    is_there, found = np.isfinite(totals), dict[str, str]()
    left = {name: each for name, column in columns.items() if (each := _numbers(column)) is not None}
    while left:
        values = np.nan_to_num(np.stack(list(left.values()), axis=1)[is_there])
        sizes = np.maximum(np.abs(values).max(axis=0, initial=0), 1e-12)
        weights = np.linalg.lstsq(values / sizes, totals[is_there], rcond=None)[0] / sizes
        signs = np.clip(np.round(weights), -1, 1)
        is_near = np.abs(values @ signs - totals[is_there]) <= _MOST_ROUNDED * np.maximum(np.abs(totals[is_there]), 1)
        names = [name for name, sign in zip(left, signs, strict=True) if sign > 0]
        if not names or is_near.mean() < _EXACT:
            break
        others = [name for name, sign in zip(left, signs, strict=True) if sign < 0]
        why = f"{' + '.join(names)}{''.join(f' - {name}' for name in others)} is the label"
        found |= dict.fromkeys(names, why)
        left = {name: each for name, each in left.items() if name not in names}
    return found


def _numbers(column: ColumnSurvey) -> NDArray[np.float64] | None:
    """Return the numbers of the first rows, NaN where one is missing; None of columns that have others."""
    cells = column.first() if holds(column) in ("integers", "fractions") and not column.written else None
    if cells is None:
        return None
    return np.asarray(read_cells(cells, FLOATS)[0].to_numpy(zero_copy_only=False), np.float64)


def result_of(column: ColumnSurvey, label: ColumnSurvey, wanted: LabelSuggestion) -> str:
    """Say why a column is a result, by the first rows: something is in it only where the label is 1; or "".

    Fractions that are 0 there are none: in samples that were drawn by the label, means of a user's past may be so.
    """
    cells, labels = column.first(), label.first()
    if cells is None or labels is None:
        return ""
    if wanted.text is not None:
        is_one = pc.fill_null(pc.equal(labels, wanted.text), False)
    else:
        is_one = read_cells(labels, FLOATS)[0]
        is_one = pc.fill_null(pc.greater_equal(is_one, 1.0 if wanted.at_least is None else wanted.at_least), False)
    is_one = is_one.to_numpy(zero_copy_only=False)
    zeros = [*column.null_cells, *([""] if holds(column) == "fractions" else _ZEROS)]
    is_zero = pc.fill_null(pc.is_in(cells, value_set=pa.array(zeros)), True).to_numpy(zero_copy_only=False)
    has_value = ~is_zero & ~cells.is_null().to_numpy(zero_copy_only=False)
    share = is_one.mean()
    for flags, why in (
        (has_value, "0 or nothing wherever the label is 0"),
        (is_zero & (column.values.estimate == _VALUES_OF_CLICKS), "not 0 wherever the label is 0"),
    ):
        count = int(flags.sum())
        if count >= _LEAST_RESULTS and not (flags & ~is_one).any() and share**count < _BY_CHANCE:
            return f"it is {why}: so are results"
    return ""
