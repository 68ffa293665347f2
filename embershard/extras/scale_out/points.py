"""The points of a study of scaling: a configuration on a number of ranks, measured beside predicted, or simulated."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from embershard.errors import ShardingError
from embershard.planning.verify.compare import compare
from embershard.reports.run_folder import RunFolder
from embershard.run_result import RunResult
from embershard.settings.decoding import flat
from embershard.sweeps.experiments import shown
from embershard.sweeps.spread import Configuration, Efficiency
from embershard.whole_file import whole_file

#: Folder of the simulations in that of a sweep, and the file of the points.
SIMULATED, POINTS = "simulated", "scaling.csv"
Scaling = Literal["weak", "strong"]
#: What stays the same on all numbers of ranks.
HELD: dict[Scaling, str] = {"weak": "same samples per rank", "strong": "same global batch"}
_SPEED = "samples_per_second"
_BATCHES = ("train.batch_size", "train.global_batch_size")


@dataclass(frozen=True)
class Point:
    """A configuration on a number of ranks.

    Attributes:
        source: "simulated" is an estimate.
        scaling: weak: a rank has as many samples whatever the ranks; strong: all ranks together have.
        configuration: what else differs, for readers.
        runs: those that finished; 0 simulated.
        samples_per_second: of all ranks; `low` and `high` are the ends of its interval: measured, the mean's 95 %
            confidence interval; simulated, that of the machine's constants. None: of one run.
        efficiency: samples/s of a rank, over those on the `base_ranks`, the fewest of the same configuration and
            source; `efficiency_low` and `efficiency_high` are the ends of its interval (`Efficiency`), and
            `predicted_efficiency` that of the plans.
        step_ms: the median step; `predicted_step_ms` the plan's.
        sent_bytes: of a rank in a step, by kind; `predicted_sent_bytes` the plan's.
        cache_bytes, host_bytes: slots and maps, and rows in host memory, of the fullest rank.
        peak_device_bytes: the most of a rank's tensors on its GPU; None on a CPU.
        peak_process_bytes: the most that a rank's process had; `process_bytes_before` before its model was built.
        predicted_device_bytes, predicted_host_bytes: all device memory, and all rows in host memory, of the fullest.
        hit_rate: of lookups.
        parts_ms: stages of the thread that trains, where steps were traced: means over ranks and runs.
        predicted_parts_ms: of the slowest rank, if nothing ran at the same time; simulated, they add up to the step.
        quality: figures of the held-out samples.
        notes: what is missing or mixed in it, and why.
    """

    source: Literal["measured", "simulated"]
    scaling: Scaling
    configuration: str
    ranks: int
    batch_size: int
    samples_per_second: float
    efficiency: float
    base_ranks: int = 0
    efficiency_low: float | None = None
    efficiency_high: float | None = None
    predicted_efficiency: float | None = None
    runs: int = 0
    device: str = ""
    low: float | None = None
    high: float | None = None
    step_ms: float | None = None
    predicted_step_ms: float | None = None
    sent_bytes: Mapping[str, float] = field(default_factory=dict)
    predicted_sent_bytes: Mapping[str, float] = field(default_factory=dict)
    cache_bytes: int | None = None
    predicted_cache_bytes: int | None = None
    host_bytes: int | None = None
    predicted_host_bytes: int | None = None
    peak_device_bytes: int | None = None
    predicted_device_bytes: int | None = None
    peak_process_bytes: int | None = None
    process_bytes_before: int | None = None
    hit_rate: float | None = None
    predicted_hit_rate: float | None = None
    parts_ms: Mapping[str, float] = field(default_factory=dict)
    predicted_parts_ms: Mapping[str, float] = field(default_factory=dict)
    quality: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """What the points of one curve have in common."""
        return f"{self.scaling}: {self.configuration}"

    @property
    def error(self) -> float | None:
        """The predicted step over the measured one, minus 1; None where one is not known."""
        if self.predicted_step_ms is None or not self.step_ms:
            return None
        return self.predicted_step_ms / self.step_ms - 1

    @property
    def predicted_per_second(self) -> float | None:
        """Samples per second as predicted."""
        return None if self.predicted_step_ms is None else 1e3 * self.batch_size / self.predicted_step_ms

    @property
    def ideal_per_second(self) -> float:
        """Samples per second if each rank were as fast as on the fewest ranks."""
        return self.samples_per_second / self.efficiency

    @property
    def predicted_process_bytes(self) -> int | None:
        """The most of a rank's process, as its plan has it: what was there before the model, and rows in host memory;
        on a CPU also what a plan calls device memory."""
        if None in (self.process_bytes_before, self.predicted_host_bytes, self.predicted_device_bytes):
            return None
        on_device = self.predicted_device_bytes if self.device == "cpu" else 0
        return (self.process_bytes_before or 0) + (self.predicted_host_bytes or 0) + (on_device or 0)


def points_of(configurations: Sequence[Configuration], simulations: Mapping[Path, Path]) -> list[Point]:
    """Return the measured points, and the simulated ones of the same lines, in the order of lines and ranks.

    Args:
        configurations: of the sweep.
        simulations: by the folder of a run, the file of the simulation of its configuration.
    """
    found = []
    for (scaling, name), line in _lines(configurations):
        measured = [_measured(scaling, name, each, line[0]) for each in line]
        found += [replace(each, predicted_efficiency=_predicted_efficiency(each, measured[0])) for each in measured]
        files = {simulations[folder] for each in line for folder in each.folders if folder in simulations}
        for file in sorted(files):
            found += _simulated(scaling, name, file)
    return found


def _predicted_efficiency(here: Point, base: Point) -> float | None:
    if here.predicted_per_second is None or base.predicted_per_second is None:
        return None
    return here.predicted_per_second / here.ranks / (base.predicted_per_second / base.ranks)


def absent(configurations: Sequence[Configuration], simulations: Mapping[Path, Path]) -> list[str]:
    """Return what has no point, and why; and what is not the same in all runs, as sentences."""
    found = []
    for each in configurations:
        if not each.results:
            ends = {f"{outcome.status}: {outcome.reason}" for outcome in each.outcomes}
            found.append(f"{each.name}: no run finished ({'; '.join(sorted(ends))})")
        elif each.spread(_SPEED) is None:
            found.append(f"{each.name}: no step was timed")
    for file in sorted(set(simulations.values())):
        runs = json.loads(file.read_text(encoding="utf-8"))["runs"]
        found += [
            f"simulated on {run['num_ranks']} ranks ({file.name}): {run['problem']}" for run in runs if run["problem"]
        ]
    results = [result for each in configurations for result in each.results]
    what = {"device": [each.device for each in results], "commit": [str(each.git_commit) for each in results]}
    for package in dict.fromkeys(package for each in results for package in each.versions):
        what[package] = [each.versions.get(package, "none") for each in results]
    for name, values in what.items():
        if len(both := sorted(set(values))) > 1:
            found.append(f"runs differ in more than the study varies, {name}: {', '.join(both)}")
    return found


def _lines(
    configurations: Sequence[Configuration],
) -> list[tuple[tuple[Scaling, str], list[Configuration]]]:
    """Return what was timed by lines, in the order of ranks. What a line holds is what the settings of its runs say:
    `train.global_batch_size` is strong scaling, `train.batch_size` weak, unless these sizes differ between ranks so
    that all ranks together have the same."""
    timed = [each for each in configurations if each.results and each.spread(_SPEED) is not None]
    of_settings = [_line(each) for each in timed]
    as_strong = [_line(each, "strong") for each in timed]
    lines: dict[tuple[Scaling, str], list[Configuration]] = {}
    for each, own, strong in zip(timed, of_settings, as_strong, strict=True):
        is_alone = of_settings.count(own) == 1
        same = [other for other, is_so in zip(of_settings, as_strong, strict=True) if is_so == strong]
        are_alone = all(of_settings.count(other) == 1 for other in same)
        lines.setdefault(strong if is_alone and are_alone and len(same) > 1 else own, []).append(each)
    ordered = sorted(lines.items(), key=lambda item: (item[0][0] == "strong", item[0][1]))
    return [(key, sorted(line, key=_ranks)) for key, line in ordered]


def _ranks(configuration: Configuration) -> int:
    return configuration.outcomes[0].ranks


def _line(configuration: Configuration, scaling: Scaling | None = None) -> tuple[Scaling, str]:
    settings = _settings(configuration)
    all_ranks, of_rank = settings.get("train.global_batch_size"), settings.get("train.batch_size")
    scaling = scaling or ("weak" if all_ranks is None else "strong")
    differing = {
        key: "searched" if key == "plan" and not configuration.varied[key] else configuration.varied[key]
        for key in configuration.differing
        if key in configuration.varied and key not in (*_BATCHES, "ranks")
    }
    batch = f"{of_rank:,} a rank" if scaling == "weak" else f"{_batch_size(configuration):,} in all"
    return scaling, ", ".join(filter(None, (shown(differing), batch)))


def _settings(configuration: Configuration) -> dict[str, Any]:
    return RunFolder.read(configuration.folders[0]).settings()


def _batch_size(configuration: Configuration) -> int:
    settings = _settings(configuration)
    all_ranks = settings.get("train.global_batch_size")
    return int(settings["train.batch_size"] * _ranks(configuration) if all_ranks is None else all_ranks)


def _measured(scaling: Scaling, name: str, here: Configuration, fewest: Configuration) -> Point:
    speed, first = here.spread(_SPEED), fewest.spread(_SPEED)
    assert speed is not None, "it was looked at"
    assert first is not None, "it was looked at"
    half = speed.interval
    share = Efficiency.of(speed, _ranks(here), first, _ranks(fewest))
    steps = [result.step_ms.p50 for result in here.results if result.step_ms.p50 is not None]
    hits = here.spread("cache.hit_rate_lookups")
    quality = {name for result in here.results for name in result.quality}
    predictions, why_none = _predictions(here.folders[0], here.results)
    return Point(
        source="measured",
        scaling=scaling,
        configuration=name,
        ranks=_ranks(here),
        batch_size=_batch_size(here),
        samples_per_second=speed.mean,
        efficiency=share.value,
        base_ranks=share.base_ranks,
        efficiency_low=None if share.half is None else max(0.0, share.value - share.half),
        efficiency_high=None if share.half is None else share.value + share.half,
        runs=len(here.results),
        device=here.results[0].device,
        low=None if half is None else max(0.0, speed.mean - half),
        high=None if half is None else speed.mean + half,
        step_ms=fmean(steps) if steps else None,
        sent_bytes=_mean([asdict(result.sent_bytes.over(result.parts)) for result in here.results]),
        hit_rate=None if hits is None else hits.mean,
        parts_ms=_mean([rank["training"] for folder in here.folders for rank in RunFolder.read(folder).stages]),
        quality={name: spread.mean for name in sorted(quality) if (spread := here.spread(name)) is not None},
        notes=tuple(_notes(here, share, why_none)),
        **_memory(here.results),
        **predictions,
    )


def _memory(results: Sequence[RunResult]) -> dict[str, Any]:
    """Return what the fullest ranks had, by the fields of `Point`."""
    caches = [cache for result in results for cache in result.caches.values()]
    ranks = [rank for result in results for rank in result.memory]
    fullest = max(ranks, key=lambda each: each.host_bytes, default=None)
    return {
        "cache_bytes": max((each.device_bytes for each in caches), default=None),
        "host_bytes": max((each.host_bytes for each in caches), default=None),
        "peak_device_bytes": max((each.device_bytes for each in ranks if each.device_bytes is not None), default=None),
        "peak_process_bytes": None if fullest is None else fullest.host_bytes,
        "process_bytes_before": None if fullest is None else fullest.host_bytes_before,
    }


def _predictions(folder: Path, results: Sequence[RunResult]) -> tuple[dict[str, Any], str]:
    """Return what the plan of a run predicts, by the fields of `Point`; else nothing, and why."""
    run = RunFolder.read(folder)
    if not run.has_plan:
        return {}, "trained without a plan, so nothing was predicted"
    plan = run.plan(None)
    try:
        found = compare(plan, results[0])
    except ShardingError as error:
        return {}, f"nothing is predicted: {error}"
    prediction = plan.prediction
    assert prediction is not None, "it was compared"
    tables = [each for each in found.tables if each.traffic.hit_rate_lookups.measured is not None]
    lookups = sum(each.traffic.lookups.predicted or 0.0 for each in tables)
    hits = [
        (each.traffic.hit_rate_lookups.predicted or 0.0) * (each.traffic.lookups.predicted or 0.0) for each in tables
    ]
    sent = {kind: pair.predicted for kind, pair in found.sent_bytes.items() if pair.predicted is not None}
    slowest = max(prediction.ranks, key=lambda each: each.step_seconds)
    return {
        "predicted_step_ms": 1e3 * prediction.step_seconds,
        "predicted_sent_bytes": sent,
        "predicted_cache_bytes": max(each.cache_device_bytes for each in prediction.ranks),
        "predicted_device_bytes": prediction.most_device_bytes,
        "predicted_host_bytes": max(each.total_host_bytes for each in prediction.ranks),
        "predicted_hit_rate": sum(hits) / lookups if lookups else None,
        "predicted_parts_ms": {name: 1e3 * seconds for name, seconds in slowest.seconds.items() if seconds},
    }, ""


def _notes(here: Configuration, share: Efficiency, why_none: str) -> Iterator[str]:
    """Yield what is missing or mixed in a measured point, and why."""
    results = here.results
    if failed := [each for each in here.outcomes if each.status != "finished"]:
        ends = "; ".join(sorted({f"{each.status}: {each.reason}" for each in failed}))
        yield f"{len(results)} of {len(here.outcomes)} runs finished ({ends})"
    if len(results) == 1:
        yield "one run: its samples/s have no interval"
    if share.half is None and _ranks(here) != share.base_ranks:
        yield f"efficiency: {share.why}"
    if why_none:
        yield why_none
    if disturbed := max((each.other_programs or 0.0 for each in results if each.is_disturbed), default=0.0):
        yield f"other programs took up to {disturbed:.0%} of the processor time: alone on the machine, steps are faster"
    if not all(each.is_steady for each in results):
        yield "too few steps for the speed of a long run"
    if any(RunFolder.read(folder).stages for folder in here.folders):
        yield "steps were traced, which makes them longer"
    if not all(each.memory for each in results):
        yield "by an earlier version, which did not measure the memory of ranks"


def _mean(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in values for name in each)
    return {name: fmean(each.get(name, 0.0) for each in values) for name in names}


def _simulated(scaling: Scaling, name: str, file: Path) -> list[Point]:
    simulation = json.loads(file.read_text(encoding="utf-8"))
    runs = [run for run in simulation["runs"] if not run["problem"]]
    return [
        Point(
            source="simulated",
            scaling=scaling,
            configuration=f"{name}; simulated on {simulation['topology']}",
            ranks=run["num_ranks"],
            batch_size=run["global_batch_size"],
            samples_per_second=run["samples_per_second"],
            efficiency=run["efficiency"],
            base_ranks=min(each["num_ranks"] for each in runs),
            low=run["global_batch_size"] / run["high_seconds"],
            high=run["global_batch_size"] / run["low_seconds"],
            predicted_step_ms=1e3 * run["step_seconds"],
            predicted_parts_ms={part: 1e3 * seconds for part, seconds in (run.get("parts") or {}).items() if seconds},
        )
        for run in runs
    ]


def write_points(points: Sequence[Point], folder: Path) -> None:
    """Write the points as `scaling.csv`, a row each."""
    more = ("error", "predicted_process_bytes")
    rows = [
        {**flat(asdict(each)), **{name: getattr(each, name) for name in more}, "notes": "; ".join(each.notes)}
        for each in points
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    with whole_file(folder / POINTS) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
