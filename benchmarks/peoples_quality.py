"""How good the model of one command is, beside LightGBM and a deep peer: `python -m benchmarks.peoples_quality FOLDER`

FOLDER has tables, `NAME.csv` with a header and a row in each line, and `columns.json`: for each NAME what somebody who
knows the data says of it: `{"label": COLUMN, "categories": [...], "numbers": [...], "lists": [...]}`, lists with `|`
between their values. The others are told so; `embershard train NAME.csv` gets no option. A fifth of the rows, by
chance and by the seed, is kept from all of them; then the AUC of these is measured. Each chooses its number of epochs
or trees by a tenth of the other rows.

With lightgbm installed it is trained, and with deepctr-torch installed DeepFM and DCN of that library are. What stands
behind a median is the standard deviation over the seeds. `ahead` is embershard less the better deep peer, seed by seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from pyarrow import csv
from torchmetrics.functional.classification import binary_auroc

from benchmarks.common import embershard, machine, make_parser, report, settings_of

Numbers = NDArray[np.float32]
Codes = NDArray[np.int64]
_TEST, _VALID = 0.2, 0.1
_DIM, _BATCH, _EPOCHS, _PATIENCE = 16, 256, 40, 3
_SKEWED = 5.0  # standard deviations from the mean to the largest number


@dataclass(frozen=True)
class Rows:
    """Rows of a table as the peers get them.

    Attributes:
        labels: [N], 0 or 1.
        numbers: [N, D], NaN where one is missing; logarithms where they are skewed.
        categories: [N, F] from 1 on; 0: missing, or not among the rows that train.
        lists: for each list [N, most values in a row], the same, with zeros behind the last value.
    """

    labels: Numbers
    numbers: Numbers
    categories: Codes
    lists: tuple[Codes, ...]

    def take(self, rows: Any) -> Rows:
        return Rows(self.labels[rows], self.numbers[rows], self.categories[rows], tuple(e[rows] for e in self.lists))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the tables")
    parser.add_argument("--systems", nargs="+", metavar="SYSTEM", help="of: embershard, lightgbm, deepfm, dcn")
    parser.add_argument("--rows", type=int, help="of a table, at most: by chance, the same for all seeds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE", help="of embershard, to try")
    options = parser.parse_args()
    about = json.loads((options.folder / "columns.json").read_text())
    found: dict[str, Any] = {}
    for name in options.only or about:
        runs: dict[str, list[float]] = {}
        for seed in options.seeds:
            for system, auc in measure(options.folder / f"{name}.csv", about[name], seed, options).items():
                runs.setdefault(system, []).append(auc)
                print(f"{name}, seed {seed}: {system} {auc:.4f}", flush=True)
        found[name] = summary(runs)
    for line in as_table(found):
        print(line)
    report({"settings": {**settings_of(options), "folder": ""}, "auc": found, "machine": machine()}, options.output)


def summary(runs: dict[str, list[float]]) -> dict[str, Any]:
    """Return median and standard deviation of each system, and by how much embershard is ahead of the better peer."""
    found: dict[str, Any] = {
        system: {"median": round(statistics.median(aucs), 4), "spread": spread(aucs), "by_seed": aucs}
        for system, aucs in runs.items()
    }
    peers = [system for system in ("deepfm", "dcn") if system in runs]
    if peers and "embershard" in runs:
        better = max(peers, key=lambda system: statistics.median(runs[system]))
        ahead = [a - b for a, b in zip(runs["embershard"], runs[better], strict=True)]
        found["ahead"] = {"of": better, "median": round(statistics.median(ahead), 4), "spread": spread(ahead)}
    return found


def spread(values: list[float]) -> float:
    return round(statistics.stdev(values), 4) if len(values) > 1 else 0.0


def as_table(found: dict[str, Any]) -> list[str]:
    """Return the lines of a table in Markdown: AUC, median (standard deviation over the seeds)."""
    systems = list(dict.fromkeys(system for each in found.values() for system in each))
    cells = [["table", *systems]] + [
        [name, *(f"{each[s]['median']:.4f} ({each[s]['spread']:.4f})" if s in each else "" for s in systems)]
        for name, each in found.items()
    ]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], "|---" * len(cells[0]) + "|", *lines[1:]]


# -- one table, one seed


def measure(path: Path, about: dict[str, Any], seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the AUC of each system on the rows that none of them has seen."""
    header, *lines = path.read_text(encoding="utf-8").splitlines()
    if options.rows is not None and len(lines) > options.rows:
        kept = np.sort(np.random.default_rng(0).choice(len(lines), options.rows, replace=False))
        lines = [lines[row] for row in kept]
    is_test = np.random.default_rng(seed).random(len(lines)) < _TEST
    systems: dict[str, Callable[[Rows, Rows, int], float]] = {}
    if find_spec("lightgbm"):
        systems["lightgbm"] = lightgbm
    if find_spec("deepctr_torch"):
        systems |= {"deepfm": lambda *rows: deepctr("DeepFM", *rows), "dcn": lambda *rows: deepctr("DCN", *rows)}
    wanted = options.systems or ["embershard", *systems]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, part in (("train", ~is_test), ("test", is_test), ("all", np.ones_like(is_test))):
            some = [line for line, is_in in zip(lines, part, strict=True) if is_in]
            Path(folder, f"{name}.csv").write_text("\n".join([header, *some, ""]), encoding="utf-8")
        if "embershard" in wanted:
            found["embershard"] = one_command(Path(folder), options.set)
        if peers := [each for each in wanted if each in systems]:
            rows = read(Path(folder, "all.csv"), about, ~is_test)
            found |= {each: systems[each](rows.take(~is_test), rows.take(is_test), seed) for each in peers}
    return found


def one_command(folder: Path, settings: list[str]) -> float:
    """Train on train.csv by one command, and return the AUC of test.csv."""
    changed = [word for each in settings for word in ("--set", each)]
    embershard(["train", f"{folder}/train.csv", "--run-dir", f"{folder}/run", *changed])
    embershard(["predict", f"{folder}/run", "--data", f"{folder}/test.csv", "-o", f"{folder}/scores.parquet"])
    scores = pq.read_table(folder / "scores.parquet")
    return auc(scores["label"].to_numpy(), scores["logit"].to_numpy())


def auc(labels: NDArray[Any], scores: NDArray[Any]) -> float:
    return round(float(binary_auroc(torch.from_numpy(scores.copy()), torch.from_numpy(labels.astype(np.int64)))), 5)


def read(path: Path, about: dict[str, Any], trains: NDArray[np.bool_]) -> Rows:
    """Return all rows. Codes, logarithms and missing numbers are told by those that train."""
    texts = {name: pa.string() for name in (*about["categories"], *about.get("lists", ()))}
    table = csv.read_csv(path, convert_options=csv.ConvertOptions(column_types=texts, strings_can_be_null=False))
    numbers = np.empty((len(table), len(about["numbers"])), np.float32)
    for place, name in enumerate(about["numbers"]):
        values = pc.cast(table[name], pa.float64()).to_numpy(zero_copy_only=False)
        some = values[trains & ~np.isnan(values)]
        if some.min() >= -1 and some.max() > some.mean() + _SKEWED * some.std():
            values, some = np.log1p(values.clip(0)), np.log1p(some.clip(0))
        numbers[:, place] = (values - some.mean()) / (some.std() or 1.0)
    return Rows(
        table[about["label"]].to_numpy().astype(np.float32),
        numbers,
        np.stack([coded(table[name].to_pylist(), trains) for name in about["categories"]], 1),
        tuple(coded_lists(table[name].to_pylist(), trains) for name in about.get("lists", ())),
    )


def coded(cells: list[str], trains: NDArray[np.bool_]) -> Codes:
    """Return numbers of texts: from 1 on for those that train, 0 for the others and for empty ones."""
    known = dict.fromkeys(cell for cell, is_in in zip(cells, trains, strict=True) if is_in and cell)
    numbers = {cell: number for number, cell in enumerate(known, 1)}
    return np.array([numbers.get(cell, 0) for cell in cells], np.int64)


def coded_lists(cells: list[str], trains: NDArray[np.bool_]) -> Codes:
    parts = [cell.split("|") for cell in cells]
    lengths = [len(each) for each in parts]
    codes = coded([part for each in parts for part in each], np.repeat(trains, lengths))
    found = np.zeros((len(cells), max(lengths)), np.int64)
    found[np.arange(max(lengths)) < np.array(lengths)[:, None]] = codes
    return found


def parted(rows: Rows, seed: int) -> tuple[Rows, Rows]:
    """Return the rows that train, and those that say when to stop."""
    is_valid = np.random.default_rng(seed + 1000).random(len(rows.labels)) < _VALID
    return rows.take(~is_valid), rows.take(is_valid)


# -- peers


def lightgbm(rows: Rows, test: Rows, seed: int) -> float:
    """Trees on the codes as categories; a value of a list is a column of 0 and 1."""
    import lightgbm as lgb

    def columns(of: Rows) -> NDArray[np.float64]:
        flags = [
            (each[:, :, None] == np.arange(1, most + 1)).any(1) for each, most in zip(of.lists, sizes, strict=True)
        ]
        return np.concatenate([of.categories, of.numbers, *flags], 1, dtype=np.float64)

    sizes = [int(each.max()) for each in rows.lists]
    train, valid = parted(rows, seed)
    categories = list(range(rows.categories.shape[1]))
    sets = [lgb.Dataset(columns(each), each.labels, categorical_feature=categories) for each in (train, valid)]
    settings = {"objective": "binary", "metric": "auc", "learning_rate": 0.05, "verbose": -1, "num_threads": 1}
    stop = lgb.early_stopping(50, verbose=False)
    model = lgb.train({**settings, "seed": seed}, sets[0], 2000, [sets[1]], callbacks=[stop])
    return auc(test.labels, model.predict(columns(test)))


def deepctr(name: str, rows: Rows, test: Rows, seed: int) -> float:
    """A model of DeepCTR-Torch: Adam at 0.001, batches of 256, embeddings of 16; the best of up to 40 epochs."""
    from deepctr_torch import models
    from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat

    def inputs(of: Rows) -> dict[str, Any]:
        found: dict[str, Any] = {f"c{n}": column for n, column in enumerate(of.categories.T)}
        found |= {f"n{n}": column for n, column in enumerate(np.nan_to_num(of.numbers).T)}
        return found | {f"l{n}": each for n, each in enumerate(of.lists)}

    features = [SparseFeat(f"c{n}", int(most) + 1, _DIM) for n, most in enumerate(rows.categories.max(0))]
    features += [DenseFeat(f"n{n}", 1) for n in range(rows.numbers.shape[1])]
    for n, each in enumerate(rows.lists):
        inner = SparseFeat(f"l{n}", int(each.max()) + 1, _DIM)
        features.append(VarLenSparseFeat(inner, maxlen=each.shape[1], combiner="mean"))
    train, valid = parted(rows, seed)
    model = getattr(models, name)(features, features, task="binary", seed=seed)
    model.compile("adam", "binary_crossentropy")
    best, state, worse = 0.0, None, 0
    for _ in range(_EPOCHS):
        model.fit(inputs(train), train.labels, batch_size=_BATCH, epochs=1, verbose=0)
        got = auc(valid.labels, model.predict(inputs(valid), 4096).ravel())
        worse = 0 if got > best else worse + 1
        if got > best:
            best, state = got, deepcopy(model.state_dict())
        if worse == _PATIENCE:
            break
    model.load_state_dict(state)
    return auc(test.labels, model.predict(inputs(test), 4096).ravel())


if __name__ == "__main__":
    main()
