"""Bits of whole runs in this tree beside an older commit's: do they train the same model, and does this tree go on with
what the older one saved?

    python -m benchmarks.run_digests --old REVISION

Twelve small runs on two ranks, on generated samples: modes, ids, tasks, time order. A digest is over every tensor of
the last checkpoint; losses and figures of metrics.jsonl are compared, too. Each run is then made in two halves, first
by the older commit, then by this tree: at its end the model must be the same, and `predict` and `report` must read it.
(Which rows are cached may differ: a run that goes on has looked ahead from another place.)
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed.checkpoint as dcp

from benchmarks.common import machine, make_parser, report
from benchmarks.step_versions import ROOT, checkout

STEPS, BATCH, SAMPLES = 24, 64, 6000
_TABLE = """
[data]
kind = "table"
path = "{samples}"
{data}
[data.table]
label = {label}
{table}
[data.table.features]
price = {{kind = "dense", scale = "log1p"}}
user = {{kind = "sparse", mapping = "{mapping}", num_rows = 480}}
item = {{kind = "sparse", mapping = "{mapping}", num_rows = 336}}
tags = {{kind = "sparse", mapping = "modulo", num_rows = 90}}
{after}
[model]
arch = "{arch}"
embedding_dim = 8
{model}
[cache]
ratio = 0.6
[train]
batch_size = 64
max_steps = {steps}
log_every = 4
{evals}
[checkpoint]
every_steps = {every}
"""
_DLRM = "dense_arch_layer_sizes = [16, 8]\nover_arch_layer_sizes = [16, 1]"
_TASKS = {
    "label": '["click", "bought", "minutes"]',
    "table": 'task = ["binary", "binary", "regression"]\nlabel_masks = ["", "click", "click"]\nlabel_mean = [6.0]',
    "arch": "mmoe",
    "model": "dense_arch_layer_sizes = [16, 8]\nnum_experts = 3\n"
    "expert_layer_sizes = [8]\nover_arch_layer_sizes = [8, 1]",
}
#: Of each run: values of the settings' text, and further words of the command.
RUNS: dict[str, tuple[dict[str, str], list[str]]] = {
    "pooled": ({}, []),
    "look_ahead": ({}, ["look_ahead.lookahead=8", "look_ahead.prefetch=2"]),
    "lru, sgd, fp16": ({}, ["cache.policy=lru", "embedding_optimizer.kind=sgd", "model.table_dtype=fp16"]),
    "static": ({}, ["cache.policy=static", "profile.samples=3000"]),
    "rows": ({}, ["sharding.exchange=rows", "look_ahead.lookahead=8"]),
    "hot_cold": ({}, ["sharding.mode=hot_cold", "sharding.hot_bytes=4000", "profile.samples=3000"]),
    "data_parallel": ({}, ["sharding.mode=data_parallel"]),
    "dcn": ({"arch": "dlrm_dcn", "model": _DLRM + "\ndcn_num_layers = 2\ndcn_low_rank_dim = 4"}, []),
    "deepfm": ({"arch": "deepfm", "model": "over_arch_layer_sizes = [16, 1]"}, ["look_ahead.lookahead=8"]),
    "tasks": (_TASKS, ["look_ahead.lookahead=8"]),
    "ids": ({"mapping": "ids"}, ["ids.*.admit_after=2", "look_ahead.lookahead=8"]),
    "time order": ({"data": '[data.time]\ncolumn = "at"\nwindow = 3600', "evals": ""}, []),
}


def main() -> None:
    """Train, compare and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--old", required=True, help="a git revision")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    options = parser.parse_args()
    found = {}
    with checkout(options.old) as old, tempfile.TemporaryDirectory() as folder:
        samples = write_samples(Path(folder, "samples.parquet"))
        for name in options.runs:
            found[name] = compare(name, old, samples, Path(folder, name.replace(", ", "_").replace(" ", "_")))
            print(name, found[name], file=sys.stderr, flush=True)
    is_same = all(each["is_same"] and each["goes_on"] for each in found.values())
    report(
        {"benchmark": "run_digests", "old": options.old, "is_same": is_same, "runs": found, **machine()}, options.output
    )


def compare(name: str, old: Path, samples: Path, folder: Path) -> dict[str, Any]:
    """Return the digests of the older commit's run, of this tree's, and of one begun by the first and ended by this."""
    values, settings = RUNS[name]
    folder.mkdir()
    whole, half = folder / "whole.toml", folder / "half.toml"
    text = {
        "data": "",
        "table": "",
        "label": '"click"',
        "mapping": "modulo",
        "after": "",
        "arch": "dlrm",
        "model": _DLRM,
    }
    text |= {"samples": str(samples), "evals": "eval_every = 12", **values}
    whole.write_text(_TABLE.format(**text, steps=STEPS, every=STEPS), encoding="utf-8")
    half.write_text(_TABLE.format(**text, steps=STEPS, every=STEPS // 2), encoding="utf-8")
    words = [word for setting in settings for word in ("--set", setting)]
    train(old, ["--config", str(whole), *words, "--run-dir", str(folder / "old")])
    train(ROOT, ["--config", str(whole), *words, "--run-dir", str(folder / "new")])
    train(old, ["--config", str(half), *words, "--run-dir", str(folder / "both")])
    newest = folder / "both" / "checkpoints" / f"step_{STEPS}"
    newest.rename(folder / "dropped")
    train(ROOT, ["--config", str(half), *words, "--run-dir", str(folder / "both"), "--resume"])
    run(ROOT, ["report", str(folder / "both")])
    run(ROOT, ["predict", str(folder / "both"), "--data", str(samples), "-o", str(folder / "scores.parquet")])
    before, after = (digest(folder / each) for each in ("old", "new"))
    models = [digest(folder / each, with_caches=False) for each in ("new", "both")]
    lines = {each: metrics_of(folder / each) for each in ("old", "new")}
    is_same = before == after and lines["old"] == lines["new"]
    return {
        "digest": after[:16],
        "is_same": is_same,
        "goes_on": models[0] == models[1],
        "tensors": len(tensors(folder / "new")),
    }


def train(tree: Path, words: list[str]) -> None:
    """Train on two ranks."""
    run(tree, ["train", *words, "--nproc", "2"])


def run(tree: Path, words: list[str]) -> None:
    """Run a command of a tree."""
    paths = {"PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "embershard", *words],
        cwd=tree,
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a run's last checkpoint."""
    found = {}
    for group in sorted(file.parent for file in Path(folder, "checkpoints", f"step_{STEPS}").rglob(".metadata")):
        entries = dcp.FileSystemReader(group).read_metadata().state_dict_metadata
        target = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in entries.items()
            if hasattr(entry, "properties")
        }
        dcp.load(target, checkpoint_id=group, no_dist=True)
        found.update({f"{group.name}/{key}": value for key, value in target.items()})
    assert found, f"{folder} has no tensors"
    return found


def digest(folder: Path, with_caches: bool = True) -> str:
    """Return the checksum of a run's last checkpoint."""
    made = hashlib.sha256()
    found = {name: each for name, each in tensors(folder).items() if with_caches or "/cache." not in name}
    for name, tensor in sorted(found.items()):
        made.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        made.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Return what a run reported, but for times, speeds and memory."""
    kept = ("step", "loss", "auc", "ne", "logloss", "rmse", "hit_rate", "samples")
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key.partition("/")[0] in kept} for line in lines]


def write_samples(path: Path) -> Path:
    """Write samples whose ids drift with time."""
    draw = np.random.default_rng(5)
    at = np.sort(draw.integers(0, 6 * 3600, SAMPLES)) + 1_700_000_000
    drift = (at - at[0]) // 900
    user, item = (draw.zipf(1.2, SAMPLES) % size + drift for size in (400, 250))
    price = draw.gamma(2.0, 4.0, SAMPLES)
    is_click = draw.random(SAMPLES) < 1 / (1 + np.exp(price / 8 - 0.3 * (user % 5)))
    columns = {
        "user": user.astype(np.int64),
        "item": item.astype(np.int64),
        "tags": pa.array([draw.integers(0, 90, draw.integers(0, 4)).tolist() for _ in range(SAMPLES)]),
        "price": price,
        "at": at,
        "click": is_click.astype(np.int8),
        "bought": pa.array((draw.random(SAMPLES) < 0.4).astype(np.int8), mask=~is_click),
        "minutes": pa.array(draw.gamma(2.0, 3.0, SAMPLES), mask=~is_click),
    }
    pq.write_table(pa.table(columns), path, row_group_size=1000)
    return path


if __name__ == "__main__":
    main()
