"""What bad cells cost: `python -m benchmarks.bad_cells`

A CSV file, and the same with a share of bad cells of one kind, or of all kinds, are read by turns: as `embershard data
validate` reads them, and in batches, as training does. The figures are medians of the CPU time over that of the clean
file, each pair measured side by side. Target: 1.3.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import machine, make_parser, median_ratio, report, settings_of
from embershard.commands.data.scan import scan_data
from embershard.data import BatchStream, DataConfig, open_source
from embershard.data.config import TableConfig, TableFeature

COLUMNS = ("label", "weight", "price", "age", "user", "item", "city", "tags", "at", "seen")
FEATURES = {
    "price": TableFeature("dense", scale="standardize", mean=50.0, std=30.0),
    "age": TableFeature("dense", scale="log1p"),
    "user": TableFeature("sparse", num_rows=100_000, mapping="hash"),
    "item": TableFeature("sparse", num_rows=5000, mapping="none"),
    "city": TableFeature("sparse", num_rows=1000),
    "tags": TableFeature("sparse", num_rows=500, separator="|"),
    "at_hour": TableFeature("sparse", column="at", mapping="hour"),
    "at_weekday": TableFeature("sparse", column="at", mapping="weekday"),
    "seen_hour": TableFeature("sparse", column="seen", mapping="hour"),
}
TABLE = TableConfig(FEATURES, weight="weight", max_bag_size=20)
#: By kind the column and what its cell becomes; "": the line, from its cells.
BAD: dict[str, tuple[str, Callable[[Any], str]]] = {
    "number": ("price", lambda row: ("free", "12,50 ".replace(",", "."), "n/a", "1e99")[row % 4]),
    "label": ("label", lambda row: ("2", "yes")[row % 2]),
    "weight": ("weight", lambda row: ("-1", "x")[row % 2]),
    "integer": ("user", lambda row: ("anonymous", "7.5", "9" * 25)[row % 3]),
    "id out of range": ("item", lambda row: ("-1", "5000")[row % 2]),
    "bag": ("tags", lambda row: "|".join("abcdefghijklmnopqrstuvwxyz")),
    "long text": ("city", lambda row: "x" * 2000),
    "time": ("at", lambda row: ("yesterday", "2024-02-31 10:00:00", "9999-01-01", "20240131")[row % 4]),
    "seconds": ("seen", lambda row: ("now", "1700000000000", "20240131")[row % 3]),
    "short line": ("", lambda cells: ",".join(cells[:6])),
    "open quote": ("", lambda cells: ",".join([*cells[:6], '"' + cells[6], *cells[7:]])),
    "carriage return": ("", lambda cells: ",".join([*cells[:6], "a\rb", *cells[7:]])),
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="of the file (default: %(default)s)")
    parser.add_argument("--share", type=float, default=0.001, help="bad cells of each kind (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="reads of each file (default: %(default)s)")
    parser.add_argument("--kinds", nargs="*", default=[*BAD, "all"], help="kinds of bad cells (default: each, and all)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = make_rows(options.rows)
        kinds = {"clean": [], **{kind: list(BAD) if kind == "all" else [kind] for kind in options.kinds}}
        paths = {
            name: write(Path(temporary, f"{number}.csv"), rows, of, options.share)
            for temporary in [name]
            for number, (name, of) in enumerate(kinds.items())
        }
        seconds: dict[tuple[str, str], list[float]] = {}
        for _ in range(options.rounds):
            for kind, path in paths.items():
                for way, read in (("validate", scan), ("train", batches)):
                    began = time.process_time()
                    read(path)
                    seconds.setdefault((kind, way), []).append(time.process_time() - began)
    cases = {
        kind: {
            way: {
                "cpu_seconds": round(statistics.median(seconds[kind, way]), 3),
                "over_clean": median_ratio(seconds[kind, way], seconds["clean", way]),
            }
            for way in ("validate", "train")
        }
        for kind in kinds
    }
    report(
        {"benchmark": "bad_cells", "settings": settings_of(options), "cases": cases, "machine": machine()},
        options.output,
    )


def make_rows(count: int) -> list[list[str]]:
    """Return the cells of each row."""
    draw = np.random.default_rng(0)
    tags = [f"t{number}" for number in range(200)]
    bags = [draw.integers(0, 200, size) for size in draw.integers(1, 5, count).tolist()]
    seconds = draw.integers(1_600_000_000, 1_700_000_000, (2, count))
    times = np.char.replace(np.datetime_as_string(seconds[0].astype("datetime64[s]")), "T", " ")
    columns = (
        draw.integers(0, 2, count).astype(str),
        draw.integers(1, 4, count).astype(str),
        np.char.mod("%.2f", draw.random(count) * 100),
        draw.integers(18, 90, count).astype(str),
        draw.integers(0, 10**12, count).astype(str),
        draw.integers(0, 5000, count).astype(str),
        np.char.add("city ", draw.integers(0, 300, count).astype(str)),
        ["|".join(tags[number] for number in bag) for bag in bags],
        times,
        seconds[1].astype(str),
    )
    return [list(row) for row in zip(*(np.asarray(column).tolist() for column in columns), strict=True)]


def write(path: Path, rows: list[list[str]], kinds: list[str], share: float) -> Path:
    """Write the rows, with bad cells of these kinds, each in other rows."""
    order = np.random.default_rng(1).permutation(len(rows)).tolist()
    each = round(share * len(rows))
    lines = {}
    for number, kind in enumerate(kinds):
        column, spoil = BAD[kind]
        for row in order[number * each : (number + 1) * each]:
            cells = list(rows[row])
            if column:
                cells[COLUMNS.index(column)] = spoil(row)
            lines[row] = ",".join(cells) if column else spoil(cells)
    text = "\n".join([",".join(COLUMNS), *(lines.get(row) or ",".join(cells) for row, cells in enumerate(rows))])
    path.write_text(text + "\n", newline="")
    return path


def config_of(path: Path) -> DataConfig:
    return DataConfig("table", str(path), bad_rows=0.9, table=TABLE)


def scan(path: Path) -> None:
    """Read a file as `embershard data validate` does."""
    found = scan_data(open_source(config_of(path)), num_threads=1)
    assert not found.damage, found.damage


def batches(path: Path) -> None:
    """Read an epoch of batches, as training does."""
    config = config_of(path)
    source = open_source(config)
    with BatchStream(source, batch_size=1024, rank=0, world_size=1, split="train", epochs=1, config=config) as stream:
        for _ in stream:
            pass


if __name__ == "__main__":
    main()
