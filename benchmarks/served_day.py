"""A day of clicks, hour by hour: each hour is evaluated before it trains, and what it taught is served while the next
one trains. Clients ask a server all the time, and every answer is checked.

    python -m benchmarks.served_day --path day_0.part.txt.gz

The file has clicks in the format of Criteo 1TB, whose rows have no time. So the hours are invented: the rows, in their
order, are cut into 24 parts of equal size. `embershard train` trains them in time order and publishes after each
`--every` steps; the server of `embershard serve` follows, and clients send it rows of the file.

    hours     window by window, before its samples train: samples, AUC, NE, calibration
    answers   of the server; `states`: of how many publications; `wrong`: that are not exactly those of the state whose
              step they name, by a replica that applies the deltas one by one; `errors`: not answered
    seconds   median, 99th percentile and longest of an answer
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from benchmarks.common import machine, make_parser, report, settings_of

_NUMBERS, _IDS = [f"I{n}" for n in range(1, 14)], [f"C{n}" for n in range(1, 27)]
_DAY, _HOUR = 1_767_225_600, 3600  # 2026-01-01, UTC
_POLL_SECONDS, _CLIENTS, _ROWS = 0.05, 3, 20


def main() -> None:
    """Train, serve, ask, check, print."""
    parser = make_parser(__doc__)
    parser.add_argument("--path", type=Path, required=True, help="clicks in the format of Criteo 1TB, gzip or not")
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--every", type=int, default=5, help="steps from publication to publication")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(options, Path(folder))
    settings = {**settings_of(options), "path": options.path.name}
    report({"benchmark": "served_day", "settings": settings, **found, "machine": machine()}, options.output)


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Do all of it in a folder."""
    rows = cut_into_hours(options.path, folder / "hours", options.hours)
    (folder / "day.toml").write_text(_settings(folder, options))
    words = ["train", "--config", str(folder / "day.toml"), "--run-dir", str(folder / "run"), "--nproc", "1"]
    with (folder / "training.txt").open("w") as said:
        training = subprocess.Popen([sys.executable, "-m", "embershard", *words], stdout=said, stderr=said)
        try:
            while not list((folder / "published").glob("base_*[0-9]")):
                if training.poll() is not None:
                    raise RuntimeError((folder / "training.txt").read_text()[-2000:])
                time.sleep(_POLL_SECONDS)
            with _server(folder / "published") as port, _clients(port, rows) as answers:
                code = training.wait()
                time.sleep(1.0)  # and some of the last state
        finally:
            training.kill()
    if code:
        raise RuntimeError((folder / "training.txt").read_text()[-2000:])
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    names = ("start", "samples", "auc", "ne", "calibration")
    hours = [{name: line.get(name) for name in names} for line in lines if line["kind"] == "window"]
    return {"hours": hours, **checked(folder / "published", rows, answers)}


def cut_into_hours(path: Path, folder: Path, hours: int) -> list[dict[str, Any]]:
    """Write the rows of a file of clicks as a Parquet file per hour, with an invented time; return some of them."""
    folder.mkdir()
    names = ["label", *_NUMBERS, *_IDS]
    types = {name: pa.string() if name in _IDS else pa.int32() for name in names}
    table = pyarrow.csv.read_csv(
        path,
        pyarrow.csv.ReadOptions(column_names=names),
        pyarrow.csv.ParseOptions(delimiter="\t"),
        pyarrow.csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True),
    )
    for number, name in enumerate(names):
        if name in _IDS:
            ids = [None if text is None else int(text, 16) for text in table[name].to_pylist()]
            table = table.set_column(number, name, pa.array(ids, pa.int64()))
        elif name in _NUMBERS:
            table = table.set_column(number, name, table[name].cast(pa.float32()))
    seconds = _DAY + np.arange(table.num_rows) * (hours * _HOUR) // max(1, table.num_rows)
    table = table.append_column("time", pa.array(seconds, pa.int64()))
    for hour in range(hours):
        first, last = np.searchsorted(seconds, [_DAY + hour * _HOUR, _DAY + (hour + 1) * _HOUR])
        pq.write_table(table.slice(first, last - first), folder / f"hour_{hour:02}.parquet")
    return table.drop_columns(["label", "time"]).slice(0, 50 * _ROWS).to_pylist()


def _settings(folder: Path, options: argparse.Namespace) -> str:
    sparse = ", ".join(f'"{name}"' for name in _IDS)
    dense = ", ".join(f'"{name}"' for name in _NUMBERS)
    return f"""
[data]
kind = "parquet"
path = "{folder / "hours"}"
[data.parquet]
dense = [{dense}]
sparse = [{sparse}]
num_rows = [{", ".join(["5000"] * len(_IDS))}]
id_mapping = "hash"
dense_transform = "log1p"
[data.time]
column = "time"
window = {_HOUR}
[model]
embedding_dim = 8
dense_arch_layer_sizes = [16, 8]
over_arch_layer_sizes = [16, 1]
[cache]
ratio = 0.1
[train]
batch_size = {options.batch_size}
[publish]
folder = "{folder / "published"}"
every_steps = {options.every}
"""


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[int]:
    """What `embershard serve` starts, in this process."""
    from embershard.extras.serving.server.prediction_server import Limits, PredictionServer, Predictor

    predictor = Predictor(folder, every_seconds=_POLL_SECONDS)
    with PredictionServer(predictor, "127.0.0.1", 0, Limits()) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()
            predictor.close()


#: Number of the rows that were asked for, status (0: no answer), answer, seconds.
_Answer = tuple[int, int, dict[str, Any], float]


@contextlib.contextmanager
def _clients(port: int, rows: list[dict[str, Any]]) -> Iterator[list[_Answer]]:
    """Clients that ask all the time, each time for other rows."""
    answers: list[_Answer] = []
    is_over = threading.Event()

    def ask(first: int) -> None:
        for number in itertools.count(first):
            if is_over.is_set():
                return
            started, status, found = time.perf_counter(), 0, {}
            body = json.dumps({"rows": _rows(rows, number)})
            with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                connection.request("POST", "/predict", body)
                answer = connection.getresponse()
                found, status = json.loads(answer.read()), answer.status
            answers.append((number, status, found, time.perf_counter() - started))

    threads = [threading.Thread(target=ask, args=(1000 * client,)) for client in range(_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def _rows(rows: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    first = number * _ROWS % len(rows)
    return rows[first : first + _ROWS]


def checked(folder: Path, rows: list[dict[str, Any]], answers: list[_Answer]) -> dict[str, Any]:
    """Compare every answer with that of a replica of the state whose step it names."""
    from embershard.distributed.publish.published import published
    from embershard.extras.serving.serving_replica import Replica

    asked: dict[int, list[tuple[int, list[float]]]] = {}
    for number, status, found, _ in answers:
        if status == 200:
            asked.setdefault(found["step"], []).append((number * _ROWS % len(rows), found["logits"]))
    with mock.patch.object(Replica, "update"):
        replica = Replica(folder)  # the base, and no delta
    wrong, states = 0, 0
    for path in [None, *(path for _, path in published(folder, "delta"))]:
        if path is not None:
            replica.apply(path)
        if of_state := asked.pop(replica.have.step, None):
            states += 1
            exact = {first: replica(*replica.encode(rows[first : first + _ROWS])).tolist() for first, _ in of_state}
            wrong += sum(logits != exact[first] for first, logits in of_state)
    seconds = np.array([each[3] for each in answers])
    quantiles = {"median": np.median(seconds), "p99": np.quantile(seconds, 0.99), "longest": seconds.max()}
    return {
        "answers": len(answers),
        "errors": sum(status != 200 for _, status, _, _ in answers),
        "states": states,
        "publications": 1 + len(published(folder, "delta")),
        "wrong": wrong + sum(map(len, asked.values())),  # those of no published state
        "seconds": {name: round(float(value), 4) for name, value in quantiles.items()},
    }


if __name__ == "__main__":
    main()
