"""The runs of a sweep by configuration: repeats and seeds of the same settings together, their spread, the best, and
which of them differ from it at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from embershard.metrics.figures import METRICS, form_of, main_names, more_is_better, title_of
from embershard.run_result import RunResult, held_out_warning, steady_mark
from embershard.settings.decoding import flat, read_toml
from embershard.settings.files import RUN_CONFIG
from embershard.sweeps.experiments import SEEDS, cell, shown
from embershard.sweeps.outcomes import Outcome, read_outcomes, run_folder

_CONFIDENCE = 0.95
#: Figures beside those of quality, by their names in result.json: title, format, and whether more is better.
_FIGURES = {
    "samples_per_second": ("samples/s", ",.0f", True),
    "step_ms.p50": ("step ms, median", ".2f", False),
    "loss": ("training loss", ".5f", False),
    "cache.hit_rate_lookups": ("hits", ".2%", True),
}
SPEEDS = ("samples_per_second", "step_ms.p50")


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
        return self.half_width(_CONFIDENCE)

    def half_width(self, confidence: float) -> float | None:
        """Return the same for another confidence."""
        from scipy.special import stdtrit

        if (deviation := self.deviation) is None:
            return None
        count = len(self.values)
        return float(stdtrit(count - 1, (1 + confidence) / 2)) * deviation / count**0.5

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
class Efficiency:
    """Samples per second of a rank, over those of a rank on the fewest ranks.

    The runs of both are taken as independent, and their means as about normal. The relative variance of the ratio is
    then the sum of those of both means (sd^2 / (n mean^2)), and its 95 % confidence interval is Student's t of it, with
    the degrees of freedom of Welch and Satterthwaite.

    >>> found = Efficiency.of(Spread((180.0, 184.0)), 2, Spread((98.0, 102.0)), 1)
    >>> found.text
    '91.0% ± 11.9%'

    Attributes:
        base_ranks: the fewest.
        half: of the interval's width; None where it is not known, `why` says why.
    """

    value: float
    base_ranks: int
    half: float | None = None
    why: str = ""

    @classmethod
    def of(cls, here: Spread, ranks: int, fewest: Spread, base_ranks: int) -> Efficiency:
        """Return the efficiency of runs on so many ranks, by the samples per second of all ranks."""
        from scipy.special import stdtrit

        value = here.mean / ranks / (fewest.mean / base_ranks)
        if ranks == base_ranks:
            return cls(value, base_ranks, why="what others are compared with")
        if lone := [count for count, each in ((ranks, here), (base_ranks, fewest)) if each.deviation is None]:
            places = " and one on ".join(f"{count} {'rank' if count == 1 else 'ranks'}" for count in lone)
            return cls(value, base_ranks, why=f"one run on {places}: no interval")
        parts = [((each.deviation or 0.0) / each.mean) ** 2 / len(each.values) for each in (here, fewest)]
        if not (variance := sum(parts)):
            return cls(value, base_ranks, 0.0)
        counts = [len(each.values) - 1 for each in (here, fewest)]
        freedom = variance**2 / sum(part**2 / count for part, count in zip(parts, counts, strict=True))
        return cls(value, base_ranks, value * float(stdtrit(freedom, (1 + _CONFIDENCE) / 2)) * variance**0.5)

    @property
    def text(self) -> str:
        """For readers, with its interval."""
        return f"{self.value:.1%}" + ("" if self.half is None else f" ± {self.half:.1%}")


@dataclass(frozen=True)
class Configuration:
    """All runs of the same settings, whatever their seeds.

    Attributes:
        varied: the settings that the sweep varies, without seeds.
        differing: those of all configurations that are not the same in all.
        outcomes: of the runs that ended.
        folders: of those that finished; `results` are what these gave, and `seeds` what they were trained with.
    """

    varied: Mapping[str, Any]
    differing: Sequence[str]
    outcomes: tuple[Outcome, ...]
    folders: tuple[Path, ...]
    results: tuple[RunResult, ...]

    @property
    def seeds(self) -> list[tuple[Any, ...]]:
        """Of each run that finished, its values of `SEEDS`."""
        return [tuple(map(each.varied.get, SEEDS)) for each in self.outcomes if each.status == "finished"]

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
    return spread.text(form) + (steady_mark(*results) if figure in SPEEDS else "")


def efficiencies(configurations: Sequence[Configuration]) -> list[Efficiency | None]:
    """Return the efficiency of each configuration beside the one on the fewest ranks that differs in these alone; None
    where there is no other number of ranks."""
    speeds = [each.spread("samples_per_second") for each in configurations]
    lines: dict[str, dict[int, Spread]] = {}
    for each, speed in zip(configurations, speeds, strict=True):
        if speed is not None:
            lines.setdefault(each.without("ranks"), {})[each.outcomes[0].ranks] = speed
    found: list[Efficiency | None] = []
    for each, speed in zip(configurations, speeds, strict=True):
        line = lines.get(each.without("ranks"), {})
        fewest = min(line, default=0)
        if speed is None or len(line) < 2:
            found.append(None)
        else:
            found.append(Efficiency.of(speed, each.outcomes[0].ranks, line[fewest], fewest))
    return found


def figures_of(result: RunResult) -> dict[str, Any]:
    """Return the entries of a result by name, as `cache.hit_rate_lookups`."""
    entries = {key: value for key, value in result.to_dict().items() if key not in ("versions", "changes")}
    return flat(entries)


def read_configurations(sweep: Path) -> list[Configuration]:
    """Read the runs of a sweep that ended, in the order of what it varies.

    Raises:
        ConfigError: a file of the sweep cannot be read.
    """
    groups: dict[str, list[Outcome]] = {}
    for outcome in read_outcomes(sweep):
        groups.setdefault(outcome.group or outcome.digest, []).append(outcome)
    varied = [{key: value for key, value in own[0].varied.items() if key not in SEEDS} for own in groups.values()]
    keys = dict.fromkeys(key for each in varied for key in each)
    differing = [key for key in keys if any(each.get(key) != varied[0].get(key) for each in varied)]
    found = []
    for own, settings in zip(groups.values(), varied, strict=True):
        folders = tuple(run_folder(sweep, each.name) for each in own if each.status == "finished")
        results = tuple(map(RunResult.read, folders))
        found.append(Configuration(settings, differing, tuple(own), folders, results))
    found = _with_labels(found)
    return sorted(found, key=lambda each: [_place(each.varied.get(key)) for key in differing])


def _with_labels(configurations: list[Configuration]) -> list[Configuration]:
    """Return configurations in which the figures of runs with one label have its name, as `auc/click`, where others
    have several labels and this is one of them: so they stand in one column."""
    names = {name for each in configurations for result in each.results for name in result.quality}
    labels = {label for _, _, label in (name.partition("/") for name in names) if label}

    def with_label(folder: Path, result: RunResult) -> RunResult:
        if (label := only_label(folder)) not in labels:
            return result

        def named(own: Mapping[str, Any]) -> dict[str, Any]:
            return {name if name == "samples" or "/" in name else f"{name}/{label}": own[name] for name in own}

        slices = {column: {value: named(own) for value, own in of.items()} for column, of in result.slices.items()}
        return replace(result, quality=named(result.quality), slices=slices)

    if not labels:
        return configurations
    return [replace(each, results=tuple(map(with_label, each.folders, each.results))) for each in configurations]


def only_label(run: Path) -> str:
    """Return the name of the one label of a run's table; "" of several, and of other data.

    Raises:
        ConfigError: the run's settings cannot be read.
    """
    found = flat(read_toml(run / RUN_CONFIG)).get("data.table.label", "")
    return found if isinstance(found, str) else found[0] if len(found) == 1 else ""


def _place(value: Any) -> tuple[bool, float, str]:
    """Return the key by which values of a setting are sorted: numbers first, then texts and lists."""
    is_number = isinstance(value, int | float)
    return not is_number, value if is_number else 0, "" if is_number else str(value)


def main_figures(results: Iterable[RunResult]) -> dict[str, tuple[str, str]]:
    """Return the figures by which runs are compared: title and format by name."""
    judged = main_names((result.quality for result in results), "sweeps")
    main = {name: (title, form) for name, (title, form, _) in _FIGURES.items()}
    return {**main, **{name: (title_of(name), form_of(name)) for name in judged}}


#: Entries of result.json in rows of results, beside those of quality.
_IN_ROWS = (
    *("world_size", "steps", "samples", "samples_per_second", "step_ms.p50", "step_ms.p95", "loss"),
    *(f"cache.{name}" for name in ("hit_rate_lookups", "hit_rate_unique", "device_bytes", "host_bytes")),
)


def result_rows(
    groups: Sequence[tuple[str, Mapping[str, Any], Sequence[RunResult]]],
) -> list[dict[str, str | int | float | None]]:
    """Return a row of plain values for each group of runs, given by name, settings and results.

    `result.NAME` is the mean of a figure, by its name in result.json; of several runs, `result.NAME.sd` is the standard
    deviation, and `result.NAME.ci95` half of the width of the mean's 95 % confidence interval.
    """
    rows = []
    for name, settings, results in groups:
        row = {"name": name, **{key: cell(key, value) for key, value in settings.items()}, "runs": len(results)}
        if held_out := held_out_of(results):
            row["held_out"] = held_out
        if results:
            row["result.is_steady"] = all(result.is_steady for result in results)
        names = dict.fromkeys(key for result in results for key in (*result.quality, *flat({"slices": result.slices})))
        for figure in (*_IN_ROWS, *names):
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


def judged_figures() -> list[str]:
    """Return the names of the figures of which `is_higher_better` knows which values are better."""
    return [*(name for name, metric in METRICS.items() if metric.more_is_better is not None), *_FIGURES]


def is_higher_better(figure: str) -> bool | None:
    """Return which values of a figure are better, by its name in result.json; None where nobody can say.

    >>> is_higher_better("auc/buy"), is_higher_better("step_ms.p50"), is_higher_better("steps")
    (True, False, None)
    """
    return _FIGURES[figure][2] if figure in _FIGURES else more_is_better(figure)


def best_sentence(configurations: Sequence[Configuration], figure: str | None = None) -> str:
    """Return which configuration has the best mean of a figure, and where its best run is; empty where no run has it.

    Args:
        figure: of which `is_higher_better` knows which is better; None: the first by which models are judged.
    """
    results = [result for each in configurations for result in each.results]
    figure = figure or main_names(result.quality for result in results)[0]
    choose = max if is_higher_better(figure) else min
    found = [(spread, each) for each in configurations if (spread := each.spread(figure)) is not None]
    if not found:
        return ""
    spread, best = choose(found, key=lambda pair: pair[0].mean)
    runs: list[tuple[float, Path]] = [
        (value, folder)
        for result, folder in zip(best.results, best.folders, strict=True)
        if (value := figures_of(result).get(figure)) is not None
    ]
    value, folder = choose(runs, key=lambda pair: pair[0])
    title, form = main_figures(results).get(figure) or (title_of(figure), form_of(figure))
    of = "" if not spread.deviation else f", mean of {len(spread.values)} runs, 95 % interval"
    # Caches of different sizes train the same weights.
    equals = [each.name for other, each in found if other.mean == spread.mean and each is not best]
    warning = "" if figure in _FIGURES else held_out_warning(results)
    return (
        f"Best by {title}: {best.name}: {spread_text(best.results, figure, form)}{of}. Its best run has "
        f"{value:{form}}: {folder}"
        + "".join(f". As good: {name}" for name in equals[:1])
        + (f" and {len(equals) - 1} more" if len(equals) > 1 else "")
        + (f". {warning}" if warning else "")
    )


@dataclass(frozen=True)
class AgainstBest:
    """A figure of a configuration less that of the best one.

    Attributes:
        differences: one for each seed that both were trained with.
        num_others: configurations that are compared with the best.
    """

    figure: str
    differences: tuple[float, ...]
    num_others: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """Where the difference is, so that all intervals of the sweep hold in 95 of 100 cases; None of one seed."""
        level = 1 - (1 - _CONFIDENCE) / self.num_others
        mean, half = fmean(self.differences), Spread(self.differences).half_width(level)
        return None if half is None else (mean - half, mean + half)

    @property
    def text(self) -> str:
        """The verdict and the interval.

        >>> AgainstBest("auc", (-0.02, -0.021, -0.019), num_others=1).text
        'worse (-0.0225 to -0.0175)'
        >>> AgainstBest("auc", (-0.02, 0.03, -0.019), num_others=1).text
        'no difference (-0.0740 to +0.0680)'
        >>> AgainstBest("auc", (-0.02,), num_others=1).text, AgainstBest("auc", (0.0, 0.0), num_others=1).text
        ('one seed: not known', 'equal')
        """
        if not any(self.differences) and len(self.differences) > 1:
            return "equal"
        if self.interval is None:
            return "one seed: not known"
        low, high = self.interval
        form = f"+{form_of(self.figure)}"
        return f"{'worse' if low > 0 or high < 0 else 'no difference'} ({low:{form}} to {high:{form}})"


def against_best(configurations: Sequence[Configuration], figure: str | None = None) -> tuple[str, list[str]]:
    """Return the title and the texts of a table's column: of each configuration how it compares with the best one.

    Differences are of runs with the same seeds; repeats with one seed train one model, and are its mean. Their mean has
    a confidence interval by Student's t, at a level that is divided among the comparisons (Bonferroni).

    Args:
        figure: of a model's quality; None: the first by which models are judged.
    """
    figure = figure or main_names(result.quality for each in configurations for result in each.results)[0]
    found = [_by_seed(each, figure) for each in configurations]
    means = [fmean(values.values()) for values in found if values]
    title = f"beside the best {title_of(figure)}"
    if len(means) < 2:
        return title, ["" for _ in configurations]
    best_mean = max(means) if is_higher_better(figure) else min(means)
    best = next(values for values in found if values and fmean(values.values()) == best_mean)
    texts = []
    for values in found:
        common = [seed for seed in values if seed in best]
        differences = tuple(values[seed] - best[seed] for seed in common)
        text = AgainstBest(figure, differences, len(means) - 1).text if common else "no seed in common"
        texts.append("best" if values is best else text if values else "")
    return title, texts


def _by_seed(configuration: Configuration, figure: str) -> dict[tuple[object, ...], float]:
    """Return a figure of the model of each seed."""
    found: dict[tuple[object, ...], list[float]] = {}
    for seeds, result in zip(configuration.seeds, configuration.results, strict=True):
        if (value := figures_of(result).get(figure)) is not None:
            found.setdefault(seeds, []).append(value)
    return {seeds: fmean(values) for seeds, values in found.items()}
