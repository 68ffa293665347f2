"""`embershard plan --calibrate`: measures the speed of this machine by training a few small models on it."""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from embershard.errors import ConfigError, SetupError
from embershard.extras.calibrate.fit import fit_rates
from embershard.extras.calibrate.reference_steps import Segment, Segments
from embershard.launch.launcher import start_ranks
from embershard.launch.screen import make_table, plain_console, say
from embershard.launch.versions import versions
from embershard.planning.cost.rates import Rates, StepWork, own_work
from embershard.planning.cost.topology import Topology, save_topology
from embershard.run_result import QUIET
from embershard.settings.decoding import decode

_MODULE = "embershard.extras.calibrate.reference_steps"
_BASE: dict[str, Any] = {
    "data": {"eval_fraction": 0.0, "synthetic": {"num_samples": 2_000_000, "scale": 0.02}},
    "model": {"embedding_dim": 16, "dense_arch_layer_sizes": [64, 32, 16], "over_arch_layer_sizes": [128, 64, 1]},
    "cache": {"ratio": 0.1, "policy": "lookahead", "warmup": False},
    "look_ahead": {"lookahead": 8},
    "embedding_optimizer": {"kind": "rowwise_adagrad"},
    "train": {"batch_size": 1024, "max_steps": 1_000_000, "device": "cpu"},
}
_WIDE = {"model.dense_arch_layer_sizes": [512, 256, 16], "model.over_arch_layer_sizes": [1024, 1024, 512, 1]}
_DIM_64 = {"model.embedding_dim": 64, "model.dense_arch_layer_sizes": [64, 64]}
_DIM_128 = {"model.embedding_dim": 128, "model.dense_arch_layer_sizes": [64, 128]}
_MANY_IDS = {"data.synthetic.bag_sizes": [4], **_DIM_64}
_SMALL_CACHE = {"data.synthetic.scale": 0.1, "cache.ratio": 0.02}
_ROWS = {"sharding.exchange": "rows"}
_STOCK = {"cache": {"enabled": False}}
#: Reference settings. Each has much more of one kind of work than the others, or much less.
REFERENCE: Mapping[str, Mapping[str, Any]] = {
    "base": {},
    "small batch": {"train.batch_size": 256},
    "large batch": {"train.batch_size": 3072},
    "wide layers": _WIDE,
    "wide layers, small batch": {**_WIDE, "train.batch_size": 256},
    "dim 128": _DIM_128,
    "many ids": {"data.synthetic.bag_sizes": [8]},
    "many ids, dim 64": _MANY_IDS,
    "two exchanges": _MANY_IDS,
    "three exchanges": _MANY_IDS,
    "resident": _MANY_IDS,
    "resident, more ids": {**_MANY_IDS, "data.synthetic.bag_sizes": [16]},
    "resident, two exchanges": _MANY_IDS,
    "many ids, no fills": {"data.synthetic.bag_sizes": [8], "cache.ratio": 1.0},
    "many fills": {**_SMALL_CACHE, "data.synthetic.bag_sizes": [4]},
    "no cache": _STOCK,
    "no cache, dim 128": {**_STOCK, **_DIM_128},
    "cross layers": {"model.arch": "dlrm_dcn"},
    "cross layers, large batch": {"model.arch": "dlrm_dcn", "train.batch_size": 3072},
    "by rows": {},
    "by rows, dim 64": _DIM_64,
    "distinct rows": _ROWS,
    "distinct rows, many ids": {**_ROWS, "data.synthetic.bag_sizes": [8]},
    "slow input": {"data.synthetic.num_dense": 200, "data.synthetic.drift": 0.5},
}
#: Sharding types of the tables in turn; else all are table-wise.
SHARDING: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("by rows", "by rows, dim 64", "distinct rows, many ids"), ("row_wise",)),
    **dict.fromkeys(("two exchanges", "resident, two exchanges"), ("table_wise", "column_wise")),
    "three exchanges": ("row_wise", "table_wise", "column_wise"),
}
#: Tables without caches, by the plan.
RESIDENT = tuple(name for name in REFERENCE if name.startswith("resident"))
#: Settings that differ in one thing only, which takes little of a step: what it takes is their difference.
PAIRS = (
    ("many ids, dim 64", "two exchanges"),
    ("two exchanges", "three exchanges"),
    ("resident", "resident, two exchanges"),
    ("resident", "resident, more ids"),
    ("resident", "many ids, dim 64"),
    ("many ids", "many ids, no fills"),
)
#: TorchRec's own tables fail on a rank where a group of them has no row; the smallest reference table has 3 rows.
_MOST_STOCK_RANKS = 3
_QUICK = ("base", "wide layers, small batch", "many ids")
_NO_GPU = (
    "This machine has a GPU, and a calibration measures its CPU: on a GPU the parts of a step overlap, and their sum, "
    "which is fitted here, is not its time. For GPUs plan with a --topology of datasheets' figures, and correct it by "
    "a run: embershard report RUN --recalibrate FILE.toml."
)
#: Segments in which other programs took more than this are of no use.
_TOO_BUSY = 0.7
#: Share of the settings without which rates are fitted.
_MOST_LEFT_OUT = 0.25


def run_calibration(
    num_ranks: Sequence[int], output: str | Path | None = None, quick: bool = False, console: Console | None = None
) -> Topology:
    """Train reference settings with each of these numbers of ranks, on the CPU in fp32, and fit rates to their step
    times. Where the machine has a GPU, it says that this is not measured.

    Takes one to three minutes per number of ranks, and up to five where other programs run: then the last settings are
    left out. `quick` runs three settings for a few steps: it shows that calibration works here, its rates are rough.

    Args:
        num_ranks: each at least 1.
        output: TOML file for the topology; None writes none.

    Raises:
        ConfigError: no number of ranks, or one below 1.
        SetupError: the ranks failed, or the machine is too busy to measure most settings in time.
    """
    if not num_ranks or min(num_ranks) < 1:
        raise ConfigError(f"--ranks: got {list(num_ranks)}, needed numbers of ranks to calibrate for, each at least 1.")
    console = console or plain_console()
    if torch.cuda.is_available():
        say(console, _NO_GPU)
    rates: dict[int, Rates] = {}
    busy = 0.0
    for ranks in sorted(set(num_ranks)):
        began = time.perf_counter()
        segments = _segments(ranks, quick)
        measured = summarize(measure(ranks, segments), ranks >= (psutil.cpu_count() or 1))
        if missing := _missing(ranks, segments, measured):
            say(console, missing)
        number = {each.setting: number for number, each in enumerate(measured)}
        pairs = [(number[a], number[b]) for a, b in PAIRS if {a, b} <= set(number)]
        expected = own_work(_topology("fewer ranks", rates, busy, quick).rates_for(ranks)) if rates else None
        fit = fit_rates([(each.work, each.step_seconds) for each in measured], pairs, expected)
        rates[ranks] = fit.rates
        busy = max(busy, *(each.foreign for each in measured))
        console.print(_table(ranks, measured, fit.errors, time.perf_counter() - began))
    if busy > QUIET:
        say(
            console,
            f"Other programs used up to {busy:.0%} of this machine's processor time. Calibrate again when it is quiet.",
        )
    topology = _topology("this-machine" if output is None else Path(output).stem, rates, busy, quick)
    if output is not None:
        save_topology(topology, output)
        say(console, f"Written to {output}; use it with embershard plan --topology {output}.")
    return topology


def _missing(num_ranks: int, segments: Segments, measured: Sequence[Segment]) -> str:
    """Return a sentence on the settings for which the time did not suffice; empty where it did.

    Raises:
        SetupError: they are so many that rates would be guessed.
    """
    left_out = [name for name in segments.settings if name not in {each.setting for each in measured}]
    if not left_out:
        return ""
    busy = max((each.foreign for each in measured), default=1.0)
    said = (
        f"{num_ranks} ranks: {len(measured)} of {len(segments.settings)} settings were measured in "
        f"{segments.most_seconds:.0f} s, other programs took up to {busy:.0%} of the processor time"
    )
    if len(left_out) > _MOST_LEFT_OUT * len(segments.settings):
        raise SetupError(
            f"{said}. That is too few to fit rates to: calibrate when the machine is quiet, for fewer --ranks, or "
            "roughly (--quick)."
        )
    return f"{said}. Left out: {', '.join(left_out)}."


def _segments(num_ranks: int, quick: bool) -> Segments:
    if quick:
        settings = {name: reference_setting(REFERENCE[name]) for name in _QUICK}
        return Segments(settings, num_quiet=1, skip=3, steps=4, seconds=0)
    left_out = {key for key, is_out in (("cache", num_ranks > _MOST_STOCK_RANKS), (*_ROWS, num_ranks == 1)) if is_out}
    mixed = {name for name, types in SHARDING.items() if len(types) > 1 and num_ranks == 1}
    names = [name for name, changes in REFERENCE.items() if name not in mixed and not left_out & set(changes)]
    settings = {name: reference_setting(REFERENCE[name]) for name in names}
    options: dict[str, Any] = {"sharding": SHARDING, "resident": RESIDENT}
    return Segments(settings, num_quiet=3, skip=3, steps=8, seconds=75, **options)


def reference_setting(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's values: the base with these changes, "section.key" -> value."""
    values = copy.deepcopy(_BASE)
    for key, value in changes.items():
        *sections, name = key.split(".")
        inside = values
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[name] = copy.deepcopy(value)
    return values


def measure(num_ranks: int, segments: Segments) -> list[Segment]:
    """Start the ranks, and let them time these settings.

    Raises:
        SetupError: a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan, result = Path(folder) / "plan.json", Path(folder) / "result.json"
        plan.write_text(json.dumps(asdict(segments)), encoding="utf-8")
        if start_ranks(num_ranks, _MODULE, [str(plan), str(result)]) or not result.exists():
            raise SetupError(f"Calibration with {num_ranks} ranks failed; the ranks' own messages stand above.")
        return [decode(Segment, values) for values in json.loads(result.read_text(encoding="utf-8"))]


def summarize(segments: Sequence[Segment], ranks_fill_machine: bool) -> list[Segment]:
    """Return one segment per setting, the median of those that were measured; settings stay in their order.

    Disturbed segments count only where there is no quiet one. Ranks that keep all cores busy would have been faster
    alone: their times are scaled by their share of the processor time. Of ranks that do not, the quieter half of the
    segments counts unscaled.
    """
    by_setting: dict[str, list[Segment]] = {}
    for segment in segments:
        by_setting.setdefault(segment.setting, []).append(segment)
    found = []
    for name, of_it in by_setting.items():
        by_noise = sorted(of_it, key=lambda segment: segment.foreign)
        quiet = [segment for segment in by_noise if segment.foreign <= QUIET]
        usable = [segment for segment in by_noise if segment.foreign <= _TOO_BUSY] if ranks_fill_machine else []
        kept = quiet or usable or by_noise[: (len(by_noise) + 1) // 2]
        own = [1 - segment.foreign if ranks_fill_machine else 1.0 for segment in kept]
        seconds = median(segment.step_seconds * share for segment, share in zip(kept, own, strict=True))
        found.append(Segment(name, seconds, StepWork.mean([segment.work for segment in kept]), kept[-1].foreign))
    return found


def _topology(name: str, rates: Mapping[int, Rates], busy: float, quick: bool) -> Topology:
    how = "roughly calibrated" if quick else "calibrated"
    return Topology(
        name=name,
        source=f"its CPU, {how} here on {time.strftime('%Y-%m-%d')} with torch {versions().get('torch')}, "
        f"{psutil.cpu_count()} cores, other programs using up to {busy:.0%} of them",
        device="cpu",
        ranks_per_node=max(rates),
        host_memory_bytes=psutil.virtual_memory().total,
        cores_per_node=psutil.cpu_count(),
        rates=dict(rates),
    )


def _table(num_ranks: int, measured: Sequence[Segment], errors: Sequence[float], seconds: float) -> Table:
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    table = make_table(f"{ranks}, {seconds:.0f} s", ("setting",), ("step ms", "fitted", "other programs"))
    for each, error in zip(measured, errors, strict=True):
        table.add_row(each.setting, f"{each.step_seconds * 1e3:.1f}", f"{error:+.0%}", f"{each.foreign:.0%}")
    return table
