"""What people's files cost to be looked at and converted: `python -m benchmarks.peoples_files`

A CSV file of 20 columns is inspected and converted, and the same as Parquet is joined with another file, each in a
process of its own: CPU seconds and peak memory. `--beside FOLDER` does the same, in turn, with the project in another
folder (an older revision), and gives ratios. With duckdb installed, `--duckdb` reads the same file into Arrow, and
joins the same files, by it, too.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from benchmarks.common import machine, make_parser, median_ratio, report, settings_of

USERS = 100_003
TASKS = {
    "inspect": ["inspect", "clicks.csv", "-o", "out.toml"],
    "convert": ["convert", "clicks.csv", "-o", "out.parquet"],
    "join": ["convert", "clicks.parquet", "--join", "users.parquet", "-o", "out.parquet"],
}
_COMMAND = """
import sys, time
from embershard.commands.cli import main
began = time.process_time()
code = main(["data", *sys.argv[1:]])
"""
_SAID = """
import json, re, sys
peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())
print(json.dumps({"cpu_seconds": time.process_time() - began, "mib": int(peak[1]) / 1024}), file=sys.stderr)
"""
_DUCKDB = """
import sys, time
import duckdb, pyarrow.parquet
began = time.process_time()
con = duckdb.connect()
con.execute("set threads = 1")
if sys.argv[1] == "read":
    names = open("clicks.csv").readline().strip().replace('"', "").split(",")
    columns = ", ".join(f"'{name}': 'VARCHAR'" for name in names)
    form = f"auto_detect=false, header=true, delim=',', quote='\\"', escape='\\"', columns={{{columns}}}"
    for batch in con.sql(f"select * from read_csv('clicks.csv', {form})").to_arrow_reader(65536):
        pass
else:
    con.execute(
        "copy (select a.* exclude (n), b.* exclude (user_id) from (select *, row_number() over () n from "
        "'clicks.parquet') a left join 'users.parquet' b using (user_id) order by n) to 'out.parquet' "
        "(row_group_size 16384)"
    )
"""
_ARROW = """
import time
from pathlib import Path
from embershard.data.sources.table.text_forms import Given
from embershard.data.sources.table.whole_columns import WholeColumns
began = time.process_time()
for batch in WholeColumns.at(Path("clicks.csv"), Given()).batches():
    pass
"""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the file (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each task (default: %(default)s)")
    parser.add_argument("--beside", metavar="FOLDER", help="the project, as it was before")
    parser.add_argument("--duckdb", action="store_true", help="the same by DuckDB")
    options = parser.parse_args()
    trees = {"new": os.getcwd()} | ({"old": str(Path(options.beside).resolve())} if options.beside else {})
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), options.rows)
        for _ in range(options.rounds):
            for task, words in TASKS.items():
                for name, tree in trees.items():
                    found.setdefault((task, name), []).append(run(folder, tree, _COMMAND, *words))
            if options.duckdb:
                found.setdefault(("read", "new"), []).append(run(folder, trees["new"], _ARROW))
                for task in ("read", "join"):
                    found.setdefault((task, "duckdb"), []).append(run(folder, trees["new"], _DUCKDB, task))
    cases: dict[str, Any] = {}
    for (task, name), runs in found.items():
        medians = {key: round(statistics.median(each[key] for each in runs), 1) for key in runs[0]}
        if name != "new":
            pair = ([each["cpu_seconds"] for each in found[task, of]] for of in ("new", name))
            medians["new_over_this"] = median_ratio(*pair)
        cases.setdefault(task, {})[name] = medians
    settings = settings_of(options)
    report({"benchmark": "peoples_files", "settings": settings, "cases": cases, "machine": machine()}, options.output)


def write(folder: Path, count: int) -> None:
    """Write clicks.csv, of 20 columns, the same as Parquet, and users.parquet, whose rows are joined to them."""
    draw = np.random.default_rng(0)
    columns: dict[str, Any] = {"click": draw.integers(0, 2, count), "user_id": draw.integers(0, USERS, count)}
    columns |= {f"item_{n}_id": draw.zipf(1.3, count) % 100_003 for n in range(5)}
    columns |= {f"price_{n}": np.round(draw.gamma(2, 10, count), 2) for n in range(5)}
    columns |= {f"city_{n}": np.char.add("city ", (draw.zipf(1.4, count) % 5003).astype(str)) for n in range(5)}
    columns["seen"] = np.datetime64("2026-01-01", "s") + draw.integers(0, 90 * 86400, count).astype("timedelta64[s]")
    columns |= {"visits": draw.integers(0, 300, count), "session_id": draw.integers(0, 10**12, count)}
    csv.write_csv(pa.table(columns), folder / "clicks.csv")
    pq.write_table(pa.table(columns), folder / "clicks.parquet", row_group_size=65_536)
    users = draw.permutation(USERS)
    texts = {f"text_{n}": np.char.add("what a user said ", (users * 7919 % 9973).astype(str)) for n in range(3)}
    table = pa.table({"user_id": users, "age": users % 80, **texts})
    pq.write_table(table, folder / "users.parquet", row_group_size=65_536)


def run(folder: str, tree: str, program: str, *words: str) -> dict[str, float]:
    """Run a program in the folder with the project of a tree; return what it says of itself."""
    for name in ("out.toml", "out.parquet"):
        Path(folder, name).unlink(missing_ok=True)
    path = os.pathsep.join([tree, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", program + _SAID, *words]
    done = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tree}: {' '.join(words)}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stderr.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
