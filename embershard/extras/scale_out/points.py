"""The points of a study of scaling: a configuration on a number of ranks, measured beside predicted, or simulated."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from rich.table import Table

from embershard.launch.screen import make_table
from embershard.metrics.figures import form_of, main_names, title_of
from embershard.planning.verify.compare import PlanComparison, compare
from embershard.reports.run_folder import RunFolder
from embershard.settings.decoding import flat
from embershard.sharding.plan import Plan
from embershard.sweeps.experiments import shown
from embershard.sweeps.spread import Configuration
from embershard.units import size
from embershard.whole_file import whole_file

#: Folder of the simulations in that of a sweep, and the file of the points.
SIMULATED, POINTS = "simulated", "scaling.csv"
Scaling = Literal["weak", "strong"]
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
        efficiency: samples/s of a rank, over those on the fewest ranks of the same configuration and source.
        step_ms: the median step; `predicted_step_ms` the plan's.
        sent_bytes: of a rank in a step, by kind; `predicted_sent_bytes` the plan's.
        cache_bytes, host_bytes: slots and maps, and rows in host memory, of the fullest rank. `device_bytes`: all
            device memory of it, predicted.
        hit_rate: of lookups.
        quality: figures of the held-out samples.
    """

    source: Literal["measured", "simulated"]
    scaling: Scaling
    configuration: str
    ranks: int
    batch_size: int
    samples_per_second: float
    efficiency: float
    runs: int = 0
    low: float | None = None
    high: float | None = None
    step_ms: float | None = None
    predicted_step_ms: float | None = None
    sent_bytes: Mapping[str, float] = field(default_factory=dict)
    predicted_sent_bytes: Mapping[str, float] = field(default_factory=dict)
    cache_bytes: int | None = None
    predicted_cache_bytes: int | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    hit_rate: float | None = None
    predicted_hit_rate: float | None = None
    quality: Mapping[str, float] = field(default_factory=dict)

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


def points_of(configurations: Sequence[Configuration], simulations: Mapping[Path, Path]) -> list[Point]:
    """Return the measured points, and the simulated ones of the same lines, in the order of lines and ranks.

    Args:
        configurations: of the sweep.
        simulations: by the folder of a run, the file of the simulation of its configuration.
    """
    lines: dict[tuple[Scaling, str], list[Configuration]] = {}
    for each in configurations:
        if each.results and each.spread(_SPEED) is not None:
            lines.setdefault(_line(each), []).append(each)
    found = []
    for (scaling, name), line in sorted(lines.items(), key=lambda item: (item[0][0] == "strong", item[0][1])):
        ordered = sorted(line, key=lambda each: each.outcomes[0].ranks)
        found += [_measured(scaling, name, each, ordered[0]) for each in ordered]
        files = {simulations[folder] for each in ordered for folder in each.folders if folder in simulations}
        for file in sorted(files):
            found += _simulated(scaling, name, file)
    return found


def _line(configuration: Configuration) -> tuple[Scaling, str]:
    settings = RunFolder.read(configuration.folders[0]).settings()
    all_ranks, of_rank = settings.get("train.global_batch_size"), settings.get("train.batch_size")
    scaling: Scaling = "weak" if all_ranks is None else "strong"
    differing = {
        key: "searched" if key == "plan" and not configuration.varied[key] else configuration.varied[key]
        for key in configuration.differing
        if key in configuration.varied and key not in (*_BATCHES, "ranks")
    }
    batch = f"{of_rank:,} a rank" if all_ranks is None else f"{all_ranks:,} in all"
    return scaling, ", ".join(filter(None, (shown(differing), batch)))


def _measured(scaling: Scaling, name: str, here: Configuration, fewest: Configuration) -> Point:
    speed, first = here.spread(_SPEED), fewest.spread(_SPEED)
    assert speed is not None, "it was looked at"
    assert first is not None, "it was looked at"
    ranks, half = here.outcomes[0].ranks, speed.interval
    plan = _plan_of(here.folders[0])
    compared = [] if plan is None else [compare(plan, result) for result in here.results]
    steps = [result.step_ms.p50 for result in here.results if result.step_ms.p50 is not None]
    caches = [cache for result in here.results for cache in result.caches.values()]
    hits = here.spread("cache.hit_rate_lookups")
    quality = {name for result in here.results for name in result.quality}
    return Point(
        source="measured",
        scaling=scaling,
        configuration=name,
        ranks=ranks,
        batch_size=_batch_size(here),
        samples_per_second=speed.mean,
        efficiency=speed.mean / ranks / (first.mean / fewest.outcomes[0].ranks),
        runs=len(here.results),
        low=None if half is None else max(0.0, speed.mean - half),
        high=None if half is None else speed.mean + half,
        step_ms=fmean(steps) if steps else None,
        sent_bytes=_mean([asdict(result.sent_bytes.over(result.parts)) for result in here.results]),
        cache_bytes=max((each.device_bytes for each in caches), default=None),
        host_bytes=max((each.host_bytes for each in caches), default=None),
        hit_rate=None if hits is None else hits.mean,
        quality={name: spread.mean for name in sorted(quality) if (spread := here.spread(name)) is not None},
        **({} if plan is None else _predictions(plan, compared)),
    )


def _batch_size(configuration: Configuration) -> int:
    settings = RunFolder.read(configuration.folders[0]).settings()
    all_ranks = settings.get("train.global_batch_size")
    return int(settings["train.batch_size"] * configuration.outcomes[0].ranks if all_ranks is None else all_ranks)


def _plan_of(folder: Path) -> Plan | None:
    run = RunFolder.read(folder)
    plan = run.plan(None) if run.has_plan else None
    return None if plan is None or plan.prediction is None else plan


def _predictions(plan: Plan, compared: Sequence[PlanComparison]) -> dict[str, Any]:
    """Return what a plan predicts, by the fields of `Point`."""
    prediction, found = plan.prediction, compared[0]
    assert prediction is not None, "it was looked at"
    tables = [each for each in found.tables if each.traffic.hit_rate_lookups.measured is not None]
    lookups = sum(each.traffic.lookups.predicted or 0.0 for each in tables)
    hits = [
        (each.traffic.hit_rate_lookups.predicted or 0.0) * (each.traffic.lookups.predicted or 0.0) for each in tables
    ]
    sent = {kind: pair.predicted for kind, pair in found.sent_bytes.items() if pair.predicted is not None}
    return {
        "predicted_step_ms": 1e3 * prediction.step_seconds,
        "predicted_sent_bytes": sent,
        "predicted_cache_bytes": max(each.cache_device_bytes for each in prediction.ranks),
        "device_bytes": prediction.most_device_bytes,
        "predicted_hit_rate": sum(hits) / lookups if lookups else None,
    }


def _mean(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: fmean(each[name] for each in values) for name in values[0]}


def _simulated(scaling: Scaling, name: str, file: Path) -> list[Point]:
    runs = json.loads(file.read_text(encoding="utf-8"))
    return [
        Point(
            source="simulated",
            scaling=scaling,
            configuration=f"{name}; simulated on {runs['topology']}",
            ranks=run["num_ranks"],
            batch_size=run["global_batch_size"],
            samples_per_second=run["samples_per_second"],
            efficiency=run["efficiency"],
            low=run["global_batch_size"] / run["high_seconds"],
            high=run["global_batch_size"] / run["low_seconds"],
            predicted_step_ms=1e3 * run["step_seconds"],
        )
        for run in runs["runs"]
        if not run["problem"]
    ]


def write_points(points: Sequence[Point], folder: Path) -> None:
    """Write the points as `scaling.csv`, a row each."""
    rows = [{**flat(asdict(each)), "error": each.error} for each in points]
    names = dict.fromkeys(name for row in rows for name in row)
    with whole_file(folder / POINTS) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def point_tables(points: Sequence[Point]) -> list[Table]:
    """Return the measured points for a screen, and the simulated ones, if there are any."""
    measured, simulated = ([each for each in points if each.source == source] for source in ("measured", "simulated"))
    judged = main_names([each.quality for each in measured if each.quality], "sweeps")[:1]
    speed = ("ranks", "samples/s", "from", "to", "efficiency")
    more = ("step ms", "planned", "error", "sent/step", "caches/rank", "hits", *map(title_of, judged))
    tables = [make_table("Scaling, measured", ("configuration",), (*speed, *more))]
    tables[0].caption = (
        "from, to: the mean's 95 % confidence interval; planned: the step that the plan predicted, and its error; "
        "sent/step: by a rank; caches/rank: of the fullest"
    )
    for each in measured:
        tables[0].add_row(
            *_speed_cells(each),
            "" if each.step_ms is None else f"{each.step_ms:.2f}",
            "" if each.predicted_step_ms is None else f"{each.predicted_step_ms:.2f}",
            "" if each.error is None else f"{each.error:+.0%}",
            size(sum(each.sent_bytes.values())),
            "" if each.cache_bytes is None else size(each.cache_bytes),
            "" if each.hit_rate is None else f"{each.hit_rate:.2%}",
            *("" if name not in each.quality else format(each.quality[name], form_of(name)) for name in judged),
        )
    if simulated:
        tables.append(make_table("Scaling, SIMULATED: nothing here was measured", ("configuration",), speed))
        tables[1].caption = "from, to: by the constants of the machine"
    for each in simulated:
        tables[1].add_row(*_speed_cells(each))
    return tables


def _speed_cells(point: Point) -> tuple[str, ...]:
    return (
        f"{point.scaling}: {point.configuration}",
        f"{point.ranks:,}",
        f"{point.samples_per_second:,.0f}",
        *("" if end is None else f"{end:,.0f}" for end in (point.low, point.high)),
        f"{point.efficiency:.0%}",
    )
