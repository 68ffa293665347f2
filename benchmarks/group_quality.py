"""Held-out quality of groups beside one group, by `sharding.sync_every` and `sharding.moment_scale`.

    python -m benchmarks.group_quality CONFIG [--set NAME=VALUE ...] [--ranks 2] [--groups 2] [--sync-every 1 16 64]
        [--scales 1 0.71 0.5] [--types fp32] [--seeds 5]

All ranks train as one group, then as `--groups` groups with every pair of the two, for each seed (of the initial
weights and of the data's order). Reported of each: AUC and normalized entropy of the held-out samples for each seed,
and the mean of the differences to one group with the same seed, with a 95 % interval by Student's t; and that of the
differences to the same groups without a scale, in fp32. A scale of 1 is the setting left out; types are those of
weights in averages (`sharding.sync_dtype`).

A scale c is a learning rate over sqrt(c), so one group trains with those of each scale, too, and with that of c = n:
n groups' steps for a row that one of them touched are as much shorter. What one group gains by them is no gain of
groups.

The processes train one run after the other, so that small runs are not mostly starts; `group_quality.toml` beside this
is a sweep of commands, for longer runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
import torch.multiprocessing as mp

from benchmarks.common import machine, make_parser, report, settings_of
from benchmarks.small_rows import interval
from embershard import RunConfig, Trainer, process_group
from embershard.distributed import Ranks
from embershard.extras.groups.settings import scaled
from embershard.settings.files import load_config
from embershard.sharding.config import SyncDtype
from embershard.training.reports import EvalReport

QUALITY = ("auc", "ne")


@dataclass(frozen=True)
class Setting:
    """How ranks are grouped, averaged and scaled."""

    groups: int = 1
    sync_every: int = 1
    scale: float = 1.0
    dtype: SyncDtype = "fp32"

    @property
    def name(self) -> str:
        """As the report has it."""
        which = "one group" if self.groups == 1 else f"{self.groups} groups, every {self.sync_every}"
        return f"{which}, c {self.scale:g}" + (f", averages in {self.dtype}" if self.dtype != "fp32" else "")

    def of_run(self, config: RunConfig, seed: int) -> RunConfig:
        """Return the run with this setting and seed."""
        seeded = replace(config, train=replace(config.train, seed=seed), data=replace(config.data, seed=seed))
        if self.groups == 1:  # whose settings refuse a scale
            return replace(seeded, embedding_optimizer=scaled(config.embedding_optimizer, self.scale))
        scale = None if self.scale == 1 else self.scale
        averages = {"sync_every": self.sync_every, "moment_scale": scale, "sync_dtype": self.dtype}
        return replace(seeded, sharding=replace(config.sharding, groups=self.groups, **averages))  # type: ignore[arg-type]


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("config", help="settings of the run")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--sync-every", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--scales", type=float, nargs="+", default=[1.0, 0.71, 0.5])
    parser.add_argument("--types", nargs="+", default=["fp32"], choices=get_args(SyncDtype))
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    mp.spawn(_rank, (options,), options.ranks)  # type: ignore[no-untyped-call]


def _rank(rank: int, options: argparse.Namespace) -> None:
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.ranks), LOCAL_WORLD_SIZE=str(options.ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29000 + os.getppid() % 1000),
    )  # fmt: skip
    config = load_config(RunConfig, Path(options.config), options.set)
    with process_group("cpu") as ranks:
        found = measure(config, ranks, options)
        if rank == 0:
            settings = settings_of(options)
            settings["set"] = [each for each in options.set if not each.startswith("data.path=")]
            report({"benchmark": "group_quality", "settings": settings, **found, "machine": machine()}, options.output)


def measure(config: RunConfig, ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of every setting."""
    rates = (Setting(scale=scale) for scale in (options.groups, *options.scales) if scale != 1)
    several = (Setting(options.groups, *each) for each in product(options.sync_every, options.scales, options.types))
    settings = [Setting(), *rates, *several]
    runs: dict[Setting, list[dict[str, Any]]] = {each: [] for each in settings}
    for seed in range(1, options.seeds + 1):
        for setting in settings:
            runs[setting].append(train(setting.of_run(config, seed), ranks))
            if ranks.rank == 0:
                print(json.dumps({"seed": seed, "setting": setting.name, **runs[setting][-1]}), flush=True)
    return {"runs": compared(runs)}


def compared(runs: dict[Setting, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the runs of each setting by its name, what they differ by from those of one group, and, with a scale, from
    those of the same groups without."""
    base = runs[Setting()]
    found = {}
    for setting, own in runs.items():
        unscaled = runs[replace(setting, scale=1.0, dtype="fp32")]
        found[setting.name] = {
            "runs": own,
            **{name: _differences(own, base, name) for name in QUALITY},
            "over c = 1": {name: _differences(own, unscaled, name) for name in QUALITY},
        }
    return found


def _differences(runs: list[dict[str, Any]], others: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return interval([run[name] - other[name] for run, other in zip(runs, others, strict=True)])


def train(config: RunConfig, ranks: Ranks) -> dict[str, Any]:
    """Train one run; return its held-out quality."""
    started = time.perf_counter()
    trainer = Trainer(config, ranks)
    quality = [each.quality for each in trainer.train() if isinstance(each, EvalReport)][-1]
    steps = trainer.steps
    trainer.close()
    return {
        **{name: quality[name] for name in QUALITY},
        "steps": steps,
        "seconds": round(time.perf_counter() - started, 1),
    }


if __name__ == "__main__":
    main()
