"""Which samples have a label: by a mask, by a missing cell; and what makes a bad row all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from embershard.data import DataConfig, open_source
from embershard.data.config import TableConfig, TableFeature
from embershard.data.sources.source import FileSource

LINES = ("click,buy,stars,shown,user", "1,1,4.5,1,u1", "0,,,1,u2", "1,0,,0,u3", "0,1,2,1,u4", "1,,3,,u5")
NAN = float("nan")


def source(folder: Path, kind: str, **settings: Any) -> FileSource:
    path = folder / f"samples.{kind}"
    (folder / "samples.csv").write_text("\n".join(LINES) + "\n")
    if kind == "parquet":
        pq.write_table(pyarrow.csv.read_csv(folder / "samples.csv"), path, write_page_checksum=True)
    settings = {"label": ("click", "buy", "stars"), **settings}
    table = TableConfig({"user": TableFeature("sparse", num_rows=9)}, **settings)
    found = open_source(DataConfig("table", str(path), table=table))
    assert isinstance(found, FileSource)
    return found


TASKS = ("binary", "binary", "regression")
#: Settings, the labels of the rows that are samples, and the problems of the others by their rows.
CASES: list[tuple[dict[str, Any], list[list[float]], dict[int, str]]] = [
    (  # by another label; of a label that a sample has, a missing cell is a bad row
        {"task": TASKS, "label_masks": ("", "click", "buy")},
        [[1, 1, 4.5], [0, NAN, NAN], [1, 0, NAN], [0, NAN, NAN]],
        {4: 'buy=nan: a label must be 0 or 1; of several labels, data.table.missing_labels = "masked"'},
    ),
    (  # and with missing cells
        {"task": TASKS, "label_masks": ("", "click", ""), "missing_labels": "masked"},
        [[1, 1, 4.5], [0, NAN, NAN], [1, 0, NAN], [0, NAN, 2], [1, NAN, 3]],
        {},
    ),
    (  # by a column that is no label: one of its own must be there
        {"task": TASKS, "label_masks": ("shown", "shown", "shown"), "missing_labels": "masked"},
        [[1, 1, 4.5], [0, NAN, NAN], [NAN, NAN, NAN], [0, 1, 2]],
        {4: "shown=nan: a mask must be a number"},
    ),
    (  # the column of a class is 1 where the label is it; a label masks by its number, also one with classes
        {
            "label": ("stars", "buy"),
            "task": ("multiclass", "binary"),
            "classes": {"stars": (2, 4.5)},
            "label_masks": ("", "stars"),
            "missing_labels": "masked",
        },
        [[0, 1, 1], [NAN, NAN, NAN], [NAN, NAN, NAN], [1, 0, 1]],
        {4: "stars=3.0: a label must be one of data.table.classes.stars = [2, 4.5]"},
    ),
    (  # a label with classes alone
        {"label": "click", "task": "multiclass", "classes": {"click": (1, 0)}},
        [[1, 0], [0, 1], [1, 0], [0, 1], [1, 0]],
        {},
    ),
    (  # a label that is 1 from a number on masks by what it is then
        {"label": ("stars", "buy"), "label_at_least": (3, 1), "label_masks": ("", "stars"), "missing_labels": "masked"},
        [[1, 1], [NAN, NAN], [NAN, NAN], [0, NAN], [1, NAN]],
        {},
    ),
]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize(("settings", "labels", "bad"), CASES)
def test_labels_that_samples_have(tmp_path, kind, settings, labels, bad):
    parsed = source(tmp_path, kind, **settings).parse(0)
    assert np.array_equal(parsed.samples.labels, np.array(labels, np.float32), equal_nan=True)
    assert set(parsed.bad) == set(bad)
    for row, said in bad.items():
        assert said in str(parsed.bad[row])
