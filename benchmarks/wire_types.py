"""Types of pooled embeddings and gradients between ranks: bytes, errors, and held-out AUC beside fp32 (decision 0152).

    python -m benchmarks.wire_types examples/quickstart.toml [--set NAME=VALUE ...] [--seeds 5]

A run on two ranks, every second table by rows and the others whole, is trained with each type, forward and backward,
and for each seed (of the initial weights and of the data's order). Reported per type: the bytes that a rank sends in a
step, the held-out AUC of each seed, and the mean of the differences to fp32 of the same seed with a 95 % interval by
Student's t. "int8, gradients at random" rounds gradients up or down at random, by a hash of the seed, the step and the
place, in place of to the nearest number.

Errors are those of the rows that travel in a training in fp32, of the first seed: of embeddings (row-wise: parts of
sums) and of gradients, the largest one, and the mean one over the mean magnitude.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.common import machine, make_parser, report
from benchmarks.small_rows import interval
from embershard import RunConfig, Trainer, process_group
from embershard.commands import cli
from embershard.data.hashing import make_key, random_words, unit_floats
from embershard.distributed import Ranks
from embershard.distributed.traffic import count_sent_bytes, sent_bytes
from embershard.extras.wire_types.encoding import WIRE_TYPES, CastType, ScaledType, WireType
from embershard.settings.files import load_config
from embershard.training.fit.model_size import tables_of_run
from embershard.training.reports import EvalReport

RANKS = 2
TYPES = ("fp32", "fp16", "int8", "fp8", "int8, gradients at random", "fp8, gradients at random")
_RECORDED_EVERY = 10


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("config", help="settings of the run")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--types", nargs="+", default=list(TYPES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_plan(options, Path(folder))
        mp.spawn(_rank, (options, folder), RANKS)  # type: ignore[no-untyped-call]


def make_plan(options: argparse.Namespace, folder: Path) -> None:
    """Plan the run: every second table by rows, the others whole."""
    given = [f"--set={each}" for each in options.set]
    config = load_config(RunConfig, Path(options.config), options.set)
    kinds = {table.name: ("table_wise", "row_wise")[number % 2] for number, table in enumerate(tables_of_run(config))}
    pins = [f"--set=sharding.pin.{name}.type={kind}" for name, kind in kinds.items()]
    profile, plan = str(folder / "profile.npz"), str(folder / "plan.json")
    for command in (
        ["profile", "--config", options.config, *given, "-o", profile],
        ["plan", "--config", options.config, *given, *pins, "--profile", profile, f"--ranks={RANKS}", "-o", plan],
    ):
        if cli.main(command):
            raise SystemExit(f"embershard {' '.join(command)} failed")


def _rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29000 + os.getppid() % 1000),
    )  # fmt: skip
    count_sent_bytes()
    config = load_config(RunConfig, Path(options.config), options.set)
    config = replace(config, sharding=replace(config.sharding, plan=f"{folder}/plan.json"))
    with process_group("cpu") as ranks:
        found = measure(config, ranks, options)
        if rank == 0:
            settings = {"config": options.config, "set": options.set, "seeds": options.seeds, "ranks": RANKS}
            report({"benchmark": "wire_types", "settings": settings, **found, "machine": machine()}, options.output)


def measure(config: RunConfig, ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of every type, and the errors."""
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in options.types}
    for seed in range(options.seeds):
        for kind in options.types:
            with as_type(config, kind, seed) as own:
                runs[kind].append(train(own, ranks))
            if ranks.rank == 0:
                print(json.dumps({"seed": seed, "type": kind, **runs[kind][-1]}), flush=True)
    base = [run["auc"] for run in runs[options.types[0]]]
    types = {
        kind: {"runs": found, **interval([run["auc"] - other for run, other in zip(found, base, strict=True)])}
        for kind, found in runs.items()
    }
    return {"types": types, "errors": errors(config, ranks)}


@contextmanager
def as_type(config: RunConfig, kind: str, seed: int) -> Iterator[RunConfig]:
    """Yield the run with rows of this type between ranks, in a context in which it has to train."""
    name, _, at_random = kind.partition(", ")
    with mock.patch.dict(WIRE_TYPES):
        if at_random:  # no setting has it: it stands where WireTypes finds the type of unrounded gradients
            WIRE_TYPES["fp32"] = AtRandom(name, seed)
        yield with_types(config, name, "fp32" if at_random else name, seed)


def with_types(config: RunConfig, forward: str, backward: str, seed: int) -> RunConfig:
    """Return the run with these types and this seed."""
    return replace(
        config,
        sharding=replace(config.sharding, forward_dtype=forward, backward_dtype=backward),  # type: ignore[arg-type]
        train=replace(config.train, seed=seed),
        data=replace(config.data, seed=seed),
    )


def train(config: RunConfig, ranks: Ranks) -> dict[str, Any]:
    """Train one run; return its held-out AUC, and what a rank sent in a step."""
    started, cpu, before = time.perf_counter(), time.process_time(), sent_bytes()
    trainer = Trainer(config, ranks)
    quality = [each.quality for each in trainer.train() if isinstance(each, EvalReport)][-1]
    sent, steps = sent_bytes() - before, trainer.steps
    trainer.close()
    by_rank: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(by_rank, asdict(sent))
    return {
        "auc": quality["auc"],
        "steps": steps,
        **{f"{kind}_bytes": round(fmean(each[kind] for each in by_rank) / steps) for kind in by_rank[0]},
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }


def errors(config: RunConfig, ranks: Ranks) -> dict[str, Any]:
    """Return the errors of each type, of the rows that the first rank sends in a training in fp32."""
    embeddings, gradients = Recorder(), Recorder()
    with mock.patch.dict(WIRE_TYPES, int8=embeddings, fp8=gradients):
        run = train(with_types(config, "int8", "fp8", 0), ranks)
    return {"auc": run["auc"], "embeddings": embeddings.summary(), "gradients": gradients.summary()}


class Recorder(CastType):
    """Sends fp32, and notes what other types would make of it."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self._others: dict[str, WireType] = {kind: WIRE_TYPES[kind] for kind in ("fp16", "int8", "fp8")}
        self._largest = dict.fromkeys(self._others, 0.0)
        self._sums = dict.fromkeys(self._others, 0.0)
        self._magnitude, self._top, self._calls = 0.0, 0.0, 0

    def encode(self, rows: Tensor) -> Tensor:
        """Encode, and note every tenth call."""
        self._calls += 1
        if self._calls % _RECORDED_EVERY == 0 and rows.numel():
            self._magnitude += float(rows.abs().double().sum())
            self._top = max(self._top, float(rows.abs().max()))
            for kind, other in self._others.items():
                error = (other.decode(other.encode(rows)) - rows).abs()
                self._largest[kind] = max(self._largest[kind], float(error.max()))
                self._sums[kind] += float(error.double().sum())
        return super().encode(rows)

    def summary(self) -> dict[str, Any]:
        """Return the largest magnitude, and of each type the largest error and the mean one over the mean magnitude."""
        found: dict[str, Any] = {"largest_magnitude": self._top}
        for kind in self._others:
            found[kind] = {"largest": self._largest[kind], "mean_relative": self._sums[kind] / self._magnitude}
        return found


class AtRandom(ScaledType):
    """Rounds up or down at random, so that the mean is right: by a hash of the seed, the call and the place."""

    def __init__(self, kind: str, seed: int) -> None:
        self._is_int8 = kind == "int8"
        super().__init__(*((torch.int8, 127.0) if self._is_int8 else (torch.float8_e4m3fn, 448.0)))
        self._seed, self._calls = seed, 0

    def rounded(self, numbers: Tensor) -> Tensor:
        """Return one of the two numbers of the type around each."""
        self._calls += 1
        stream = make_key(self._seed, dist.get_rank(), self._calls)
        drawn = unit_floats(random_words(stream, np.arange(numbers.numel())))
        share = torch.from_numpy(drawn).view_as(numbers).float().clamp_(max=1 - 2**-24)  # rounded, it may be 1
        if self._is_int8:
            return numbers.add_(share).floor_().clamp_(-127, 127).to(torch.int8)
        # Three bits of a fraction: steps of 1/8 of a power of two; below 2^-6 of 2^-9.
        power = torch.frexp(numbers).exponent.clamp(min=-5) - 4
        step = torch.ldexp(torch.ones_like(numbers), power)
        return ((numbers / step + share).floor_() * step).clamp_(-448, 448).to(torch.float8_e4m3fn)


if __name__ == "__main__":
    main()
