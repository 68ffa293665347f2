"""The runs of a sweep by configuration: repeats and seeds of the same settings together, their spread, the best."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from embershard.decoding import flat, toml
from embershard.errors import ConfigError
from embershard.launch.quality_text import (
    HELD_OUT_DIFFERS,
    form_of,
    held_out_differs,
    is_better_high,
    main_names,
    steady_mark,
    title_of,
)
from embershard.launch.sweep.experiments import SEEDS, shown
from embershard.launch.sweep.outcomes import Outcome, read_outcomes, run_folder
from embershard.run_result import RunResult

_CONFIDENCE = 0.95
#: Figures beside those of quality, by their names in result.json: title, format, and whether more is better.
_FIGURES = {
    "samples_per_second": ("samples/s", ",.0f", True),
    "step_ms.p50": ("step ms, median", ".2f", False),
    "loss": ("training loss", ".5f", False),
    "cache.hit_rate_lookups": ("hits", ".2%", True),
}
_SPEEDS = ("samples_per_second", "step_ms.p50")


@dataclass(frozen=True)
class Spread:
    """One figure of several runs of the same settings.

    >>> spread = Spread((0.70, 0.72, 0.74))
    >>> f"{spread.mean:.2f} {spread.deviation:.2f} {spread.interval:.4f}"
    '0.72 0.02 0.0497'
    """

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """Standard deviation, by n - 1; None of one value."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def interval(self) -> float | None:
        """Half of the width of the mean's 95 % confidence interval, by Student's t; None of one value."""
        from scipy.special import stdtrit

        if (deviation := self.deviation) is None:
            return None
        count = len(self.values)
        return float(stdtrit(count - 1, (1 + _CONFIDENCE) / 2)) * deviation / count**0.5

    def text(self, form: str) -> str:
        """Return mean, half of the interval and deviation, each in a format.

        >>> Spread((1.0,)).text(".1f"), Spread((1.0, 1.0)).text(".1f"), Spread((1.0, 2.0, 3.0)).text(".1f")
        ('1.0', '1.0 (all equal)', '2.0 ± 2.5 (sd 1.0)')
        """
        mean = format(self.mean, form)
        if (deviation := self.deviation) is None:
            return mean
        return f"{mean} ± {self.interval:{form}} (sd {deviation:{form}})" if deviation else f"{mean} (all equal)"


@dataclass(frozen=True)
class Configuration:
    """All runs of the same settings, whatever their seeds.

    Attributes:
        varied: the settings that the sweep varies, without seeds.
        differing: those of all configurations that are not the same in all.
        outcomes: of the runs that ended.
        folders: of those that finished; `results` are what these gave.
    """

    varied: Mapping[str, Any]
    differing: Sequence[str]
    outcomes: tuple[Outcome, ...]
    folders: tuple[Path, ...]
    results: tuple[RunResult, ...]

    @property
    def name(self) -> str:
        """The settings in which it differs from others, for a reader."""
        return self.without()

    def without(self, left_out: str = "") -> str:
        """Return the name without a setting."""
        found = {key: self.varied[key] for key in self.differing if key in self.varied and key != left_out}
        return shown(found) or "all settings"

    def spread(self, figure: str) -> Spread | None:
        """Return a figure of its runs, by the name in result.json; None where none has it."""
        return spread_of(self.results, figure)


def spread_of(results: Iterable[RunResult], figure: str) -> Spread | None:
    """Return a figure of some runs, by the name in result.json; None where none has it."""
    values = tuple(value for each in results if (value := figures_of(each).get(figure)) is not None)
    return Spread(values) if values else None


def spread_text(results: Sequence[RunResult], figure: str, form: str) -> str:
    """Return a figure of some runs with its spread, for readers; "" where none has it."""
    if (spread := spread_of(results, figure)) is None:
        return ""
    return spread.text(form) + (steady_mark(*results) if figure in _SPEEDS else "")


def figures_of(result: RunResult) -> dict[str, Any]:
    """Return the entries of a result by name, as `cache.hit_rate_lookups`."""
    entries = {key: value for key, value in result.to_dict().items() if key not in ("versions", "changes")}
    return flat(entries)


def read_configurations(sweep: Path) -> list[Configuration]:
    """Read the runs of a sweep that ended, in the order of what it varies.

    Raises:
        ConfigError: a file of the sweep cannot be read.
    """
    try:
        outcomes = read_outcomes(sweep)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{sweep}/states: a file cannot be read ({error}). Remove it; the sweep runs it again."
        ) from error
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.group or outcome.digest, []).append(outcome)
    varied = [{key: value for key, value in own[0].varied.items() if key not in SEEDS} for own in groups.values()]
    keys = dict.fromkeys(key for each in varied for key in each)
    differing = [key for key in keys if any(each.get(key) != varied[0].get(key) for each in varied)]
    found = []
    for own, settings in zip(groups.values(), varied, strict=True):
        folders = tuple(run_folder(sweep, each.name) for each in own if each.status == "finished")
        results = tuple(map(RunResult.read, folders))
        found.append(Configuration(settings, differing, tuple(own), folders, results))
    return sorted(found, key=lambda each: [_place(each.varied.get(key)) for key in differing])


def _place(value: Any) -> tuple[bool, float, str]:
    """Return the key by which values of a setting are sorted: numbers first, then texts and lists."""
    is_number = isinstance(value, int | float)
    return not is_number, value if is_number else 0, "" if is_number else str(value)


def main_figures(results: Iterable[RunResult]) -> dict[str, tuple[str, str]]:
    """Return the figures by which runs are compared: title and format by name."""
    judged = main_names(result.quality for result in results)
    main = {name: (title, form) for name, (title, form, _) in _FIGURES.items()}
    return {**main, **{name: (title_of(name), form_of(name)) for name in judged}}


#: Entries of result.json in rows of results, beside those of quality.
_IN_ROWS = (
    *("world_size", "steps", "samples", "samples_per_second", "step_ms.p50", "step_ms.p95", "loss"),
    *(f"cache.{name}" for name in ("hit_rate_lookups", "hit_rate_unique", "device_bytes", "host_bytes")),
)


def result_rows(
    groups: Sequence[tuple[str, Mapping[str, Any], Sequence[RunResult]]],
) -> list[dict[str, str | int | float]]:
    """Return a row of plain values for each group of runs, given by name, settings and results.

    `result.NAME` is the mean of a figure, by its name in result.json; of several runs, `result.NAME.sd` is the standard
    deviation, and `result.NAME.ci95` half of the width of the mean's 95 % confidence interval.
    """
    rows = []
    for name, settings, results in groups:
        row = {
            "name": name,
            **{key: toml(value) if isinstance(value, list) else value for key, value in settings.items()},
        }
        row["runs"] = len(results)
        if held_out := held_out_of(results):
            row["held_out"] = held_out
        if results:
            row["result.is_steady"] = all(result.is_steady for result in results)
        for figure in (*_IN_ROWS, *dict.fromkeys(key for result in results for key in result.quality)):
            spread = spread_of(results, figure)
            if spread is not None:
                row[f"result.{figure}"] = spread.mean
                if len(results) > 1 and not isinstance(spread.values[0], int):  # counts are not drawn from anything
                    row |= {f"result.{figure}.sd": spread.deviation, f"result.{figure}.ci95": spread.interval}
        rows.append(row)
    return rows


def held_out_of(results: Iterable[RunResult]) -> str:
    """Return what the runs of one row were judged by, in words; "" where their results do not tell."""
    return "; ".join(dict.fromkeys(str(result.held_out) for result in results if result.held_out is not None))


def is_higher_better(figure: str) -> bool | None:
    """Return which values of a figure are better, by its name in result.json; None where nobody can say.

    >>> is_higher_better("auc/buy"), is_higher_better("step_ms.p50"), is_higher_better("steps")
    (True, False, None)
    """
    return _FIGURES[figure][2] if figure in _FIGURES else is_better_high(figure)


@dataclass(frozen=True)
class Best:
    """The configuration with the best mean of a figure.

    Attributes:
        title, form: of the figure.
        value, folder: of its best run.
        equals: others with the same mean. Cache sizes have: a cache changes no weight.
        warning: that the figures do not compare; else empty.
    """

    configuration: Configuration
    figure: str
    title: str
    form: str
    spread: Spread
    value: float
    folder: Path
    equals: tuple[Configuration, ...]
    warning: str

    def sentence(self) -> str:
        """Return what is best, and where."""
        of = "" if not self.spread.deviation else f", mean of {len(self.spread.values)} runs, 95 % interval"
        mean = spread_text(self.configuration.results, self.figure, self.form)
        return (
            f"Best by {self.title}: {self.configuration.name}: {mean}{of}. Its best run has "
            f"{self.value:{self.form}}: {self.folder}"
            + "".join(f". As good: {each.name}" for each in self.equals[:1])
            + (f" and {len(self.equals) - 1} more" if len(self.equals) > 1 else "")
            + (f". {self.warning}" if self.warning else "")
        )


def find_best(configurations: Sequence[Configuration], figure: str | None = None) -> Best | None:
    """Return the best configuration by a figure of which `is_higher_better` knows which is better; by default the first
    by which models are judged. None where no run has it."""
    results = [result for each in configurations for result in each.results]
    figure = figure or main_names(result.quality for result in results)[0]
    choose = max if is_higher_better(figure) else min
    found = [(spread.mean, each) for each in configurations if (spread := each.spread(figure)) is not None]
    if not found:
        return None
    mean, best = choose(found, key=lambda pair: pair[0])
    equals = tuple(each for other, each in found if other == mean and each is not best)
    runs: list[tuple[float, Path]] = [
        (value, folder)
        for result, folder in zip(best.results, best.folders, strict=True)
        if (value := figures_of(result).get(figure)) is not None
    ]
    value, folder = choose(runs, key=lambda pair: pair[0])
    title, form = main_figures(results).get(figure) or (title_of(figure), form_of(figure))
    spread = best.spread(figure)
    assert spread is not None, "it is the best by it"
    warning = HELD_OUT_DIFFERS if figure not in _FIGURES and held_out_differs(results) else ""
    return Best(best, figure, title, form, spread, value, folder, equals, warning)
