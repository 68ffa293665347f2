"""A sweep's results: every configuration with the spread over its repeats, scaling, and failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import plotly.graph_objects as go

from embershard.errors import ConfigError
from embershard.launch.quality_text import form_of, main_names, title_of
from embershard.launch.report.page.runs import PageFigure, PageTable, Section, colour, look, new_figure, text
from embershard.launch.report.run_folder import RunFolder
from embershard.launch.sweep.outcomes import Outcome, read_outcomes, run_folder
from embershard.run_result import RunResult
from embershard.units import size

_RANKS = "ranks"
_FORMS = {
    "samples/s": ",.0f",
    "step ms, median": ".2f",
    "loss": ".5f",
    "hits": ".2%",
}


@dataclass(frozen=True)
class Configuration:
    """All repeats of a run.

    Attributes:
        varied: the settings that the sweep varies, `ranks` among them.
        outcomes: of the repeats that ended.
        folders: of those that finished; `results` are what these gave.
    """

    varied: Mapping[str, Any]
    outcomes: tuple[Outcome, ...]
    folders: tuple[RunFolder, ...]

    @property
    def results(self) -> list[RunResult]:
        return [folder.result for folder in self.folders if folder.result is not None]

    @property
    def name(self) -> str:
        """The varied settings, for a reader."""
        return ", ".join(f"{key}={value}" for key, value in self.varied.items())

    @property
    def rest(self) -> str:
        """The varied settings without the number of ranks."""
        return ", ".join(f"{key}={value}" for key, value in self.varied.items() if key != _RANKS) or "all settings"

    def values(self, what: str) -> list[float]:
        """Return one of the results, of each repeat that has it."""
        return [value for result in self.results if (value := _figures(result).get(what)) is not None]


def read_sweep(path: Path) -> list[Configuration]:
    """Read the runs of a sweep that ended.

    Raises:
        ConfigError: a file of the sweep cannot be read.
    """
    try:
        outcomes = read_outcomes(path)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path}/states: a file cannot be read ({error}). Remove it; the sweep runs it again."
        ) from error
    found = []
    for digest in dict.fromkeys(outcome.digest for outcome in outcomes):
        own = tuple(outcome for outcome in outcomes if outcome.digest == digest)
        finished = [outcome for outcome in own if outcome.status == "finished"]
        folders = tuple(RunFolder.read(run_folder(path, outcome.name)) for outcome in finished)
        found.append(Configuration(own[0].varied, own, folders))
    return sorted(found, key=lambda each: [_place(value) for value in each.varied.values()])


def _place(value: Any) -> tuple[bool, float, str]:
    """Return the key by which values of a setting are sorted: numbers first, then texts and lists."""
    is_number = isinstance(value, int | float)
    return not is_number, value if is_number else 0, "" if is_number else str(value)


def sweep_section(path: Path, configurations: Sequence[Configuration]) -> Section:
    """Return the section of a sweep."""
    parts: list[PageFigure | PageTable] = [_comparison(configurations)]
    finished = [each for each in configurations if each.values("samples/s")]
    said = []
    if finished:
        parts.append(_spread(finished))
    lines = [line for line in _by_rest(finished).values() if len(line) > 1]
    if lines:
        parts.append(_scaling(lines))
    else:
        said.append("No two finished runs differ in their number of ranks alone: no scaling curve.")
    failed = [outcome for each in configurations for outcome in each.outcomes if outcome.status != "finished"]
    if failed:
        parts.append(_failures(failed))
    else:
        said.append("No run failed.")
    return Section(f"Sweep {path}", parts, said)


def _figures(result: RunResult) -> dict[str, float | None]:
    hits = None if result.cache is None else result.cache.hit_rate_lookups
    values = (result.samples_per_second, result.step_ms.p50, result.loss, hits)
    quality = {name: result.quality.get(name) for name in main_names([result.quality])}
    return dict(zip(_FORMS, values, strict=True)) | quality


def _comparison(configurations: Sequence[Configuration]) -> PageTable:
    names = list(dict.fromkeys(name for each in configurations for name in each.varied))
    judged = main_names(result.quality for each in configurations for result in each.results)
    forms = _FORMS | {name: form_of(name) for name in judged}
    rows = []
    for each in configurations:
        caches = [result.cache for result in each.results if result.cache is not None]
        rows.append(
            (
                *(str(each.varied.get(name, "")) for name in names),
                f"{len(each.folders)} of {len(each.outcomes)}",
                *(_spread_text(each.values(what), form) for what, form in forms.items()),
                size(caches[0].device_bytes) if caches else "",
            )
        )
    note = (
        "Means over the repeats that finished, in brackets the least and the greatest. finished: of the repeats that "
        "ended. hits: share of lookups. device: bytes of the caches on all ranks."
    )
    return PageTable("Comparison", (*names, "finished", *_FORMS, *map(title_of, judged), "device"), rows, note)


def _spread_text(values: Sequence[float], form: str) -> str:
    if not values:
        return ""
    ends = [format(value, form) for value in (min(values), max(values))]
    mean = format(fmean(values), form)
    return mean if ends[0] == ends[1] else f"{mean} ({ends[0]} to {ends[1]})"


def _spread(configurations: Sequence[Configuration]) -> PageFigure:
    figure = new_figure(height=200 + 26 * len(configurations))
    names = [text(each.name) for each in configurations]
    repeats = [
        (name, value) for name, each in zip(names, configurations, strict=True) for value in each.values("samples/s")
    ]
    dot = {"color": colour(0), "size": 9, "opacity": 0.7}
    bar = {"color": "black", "symbol": "line-ns-open", "size": 16, "line": {"width": 2}}
    means = [(name, fmean(each.values("samples/s"))) for name, each in zip(names, configurations, strict=True)]
    for label, points, marker in (("a run", repeats, dot), ("mean", means, bar)):
        x, y = [value for _, value in points], [name for name, _ in points]
        figure.add_trace(
            go.Scatter(x=x, y=y, mode="markers", name=label, marker=marker, hovertemplate="%{y}: %{x:,.0f}")
        )
    figure.update_xaxes(title="samples/s", rangemode="tozero")
    figure.update_yaxes(type="category", autorange="reversed", automargin=True)
    return PageFigure("Throughput, every run", figure, "Distance of the dots in a row: the spread over repeats.")


def _by_rest(configurations: Sequence[Configuration]) -> dict[str, list[Configuration]]:
    """Return configurations that differ in their number of ranks alone, in the order of that number."""
    found: dict[str, list[Configuration]] = {}
    for each in sorted(configurations, key=lambda each: each.outcomes[0].ranks):
        found.setdefault(each.rest, []).append(each)
    return found


def _scaling(lines: Sequence[Sequence[Configuration]]) -> PageFigure:
    figure = new_figure("samples/s", "efficiency")
    for number, line in enumerate(lines):
        ranks = [each.outcomes[0].ranks for each in line]
        values = [each.values("samples/s") for each in line]
        means = [fmean(each) for each in values]
        ideal = [means[0] * each / ranks[0] for each in ranks]
        bars = {
            "array": [max(each) - mean for each, mean in zip(values, means, strict=True)],
            "arrayminus": [mean - min(each) for each, mean in zip(values, means, strict=True)],
        }
        name, style = text(line[0].rest), {"color": colour(number)}
        group = {"legendgroup": name, "x": ranks}
        speed = go.Scatter(y=means, error_y=bars, mode="lines+markers", name=name, line=look(number), **group)
        dotted = {**style, "dash": "dot", "width": 1}
        perfect = go.Scatter(y=ideal, mode="lines", name=f"{name}: ideal", line=dotted, showlegend=False, **group)
        share = [mean / best for mean, best in zip(means, ideal, strict=True)]
        efficiency = go.Scatter(y=share, mode="lines+markers", name=name, line=look(number), showlegend=False, **group)
        figure.add_traces([speed, perfect, efficiency], rows=[1, 1, 1], cols=[1, 1, 2])
    figure.add_hline(y=1, line={"color": "#888888", "dash": "dot", "width": 1}, row=1, col=2)
    figure.update_xaxes(title="ranks", tickvals=sorted({each.outcomes[0].ranks for line in lines for each in line}))
    figure.update_yaxes(rangemode="tozero", row=1, col=1)
    figure.update_yaxes(tickformat=".0%", rangemode="tozero", row=1, col=2)
    note = (
        "Means over repeats; bars: the least and the greatest. Dotted: the speed of the fewest ranks times the ranks. "
        "Efficiency: samples/s over that."
    )
    return PageFigure("Scaling", figure, note)


def _failures(outcomes: Sequence[Outcome]) -> PageTable:
    rows = [
        (
            ", ".join(f"{key}={value}" for key, value in outcome.varied.items()),
            str(outcome.repeat + 1),
            str(outcome.attempt),
            outcome.status,
            f"{outcome.seconds:.1f}",
            outcome.reason,
            f"outputs/{outcome.name}.txt",
        )
        for outcome in outcomes
    ]
    return PageTable(
        "Runs that did not finish", ("run", "repeat", "attempt", "ended", "seconds", "reason", "its output"), rows
    )
