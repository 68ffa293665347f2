"""The runs of a sweep as a table: live on a terminal, else a line per run; the results as Parquet and CSV files."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv, parquet
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from embershard.launch.screen import make_table, say
from embershard.metrics.figures import form_of, main_names, more_is_better, title_of
from embershard.run_result import RunResult, steady_mark
from embershard.settings.decoding import flat
from embershard.sweeps.experiments import Experiment, cell, shown
from embershard.sweeps.outcomes import Outcome, read_outcomes, run_folder
from embershard.sweeps.spread import Configuration, against_best, main_figures, result_rows, spread_text
from embershard.units import number
from embershard.whole_file import whole_file

_TITLE_WIDTH, _SETTING_WIDTH, _BORDER = 12, 24, 3
_MOST_OF_NAMES = 0.6  # of a screen: names of settings that take more are folded
_LEFT_OUT = {"versions", "changes", "plan", "world_size"}


class SweepDisplay:
    """What becomes of the runs of a sweep.

    Args:
        console: to show it on.
        sweep: the sweep's folder.
        experiments: all of them, in the order of their execution.
        outcomes: of those that ended before.
    """

    def __init__(
        self, console: Console, sweep: Path, experiments: Sequence[Experiment], outcomes: Mapping[str, Outcome]
    ) -> None:
        self._console, self._sweep, self._experiments = console, sweep, experiments
        self._outcomes, self._running = dict(outcomes), set[str]()
        self._live: Live | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Return a context in which a terminal shows the table."""
        if not self._console.is_terminal:
            yield
            return
        with Live(self.table(), console=self._console, refresh_per_second=1) as self._live:
            yield
        self._live = None

    def begin(self, experiment: Experiment) -> None:
        """Show that a run was started."""
        self._running.add(experiment.name)
        self._refresh()

    def end(self, outcome: Outcome) -> None:
        """Show what became of a run."""
        self._running.discard(outcome.name)
        self._outcomes[outcome.name] = outcome
        if not self._console.is_terminal:
            what = f"{outcome.status}{': ' + outcome.reason if outcome.reason else ''}"
            place = f"[{len(self._outcomes)}/{len(self._experiments)}]"
            say(self._console, f"{place} {shown(outcome.varied)}, repeat {outcome.repeat + 1}: {what}")
        self._refresh()

    def table(self) -> Group:
        """Return the table of all runs."""
        keys = dict.fromkeys(key for each in self._experiments for key in each.varied)
        varied = [key for key in keys if len({str(each.varied.get(key)) for each in self._experiments}) > 1]
        ended = [each.name for each in self._experiments if each.name in self._outcomes]
        results = {name: RunResult.find(run_folder(self._sweep, name)) for name in ended}
        names = main_names((each.quality for each in results.values() if each is not None), "sweeps")
        settings, cells = _settings([each.varied for each in self._experiments], varied)
        left, right = [], []
        for experiment, own in zip(self._experiments, cells, strict=True):
            outcome = self._outcomes.get(experiment.name)
            waiting = "running" if experiment.name in self._running else "waiting"
            result = results.get(experiment.name)
            quality = {} if result is None else result.quality
            left.append([waiting if outcome is None else outcome.status, *own, str(experiment.repeat + 1)])
            right.append(
                [
                    number(None if outcome is None else outcome.seconds, ".1f"),
                    "n/a" if result is None else number(result.samples_per_second, ",.0f") + steady_mark(result),
                    number(None if result is None else result.loss, ".5f"),
                    *(number(quality.get(name), form_of(name)) for name in names),
                ]
            )
        titles = ["seconds", "samples/s", "training loss", *map(title_of, names)]
        columns = (["state", *settings, "repeat"], left), (titles, right)
        return Group(*_tables(str(self._sweep), *columns, self._console.width))

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self.table())


def spread_tables(configurations: Sequence[Configuration], width: int) -> list[Table]:
    """Return the table of configurations: means, confidence intervals and deviations over their runs. Where a screen of
    `width` characters has not all figures beside each other, there are several."""
    settings, cells = _settings([each.varied for each in configurations], configurations[0].differing)
    figures = main_figures(result for each in configurations for result in each.results)
    quality = [name for name in figures if more_is_better(name) is not None]
    title, verdicts = against_best(configurations)
    left, right = [], []
    for each, own, verdict in zip(configurations, cells, verdicts, strict=True):
        of = {name: spread_text(each.results, name, form) or "n/a" for name, (_, form) in figures.items()}
        texts = [*(of.pop(name) for name in quality), verdict, *of.values()]
        left.append([*own, str(len(each.results))])
        right.append([re.sub(r" (?=[(±]|to )", "\n", text) for text in texts])
    others = [figures[name][0] for name in figures if name not in quality]
    titles = [*(figures[name][0] for name in quality), title, *others]
    tables = _tables("Means of repeats", ([*settings, "runs"], left), (titles, right), width)
    tables[-1].caption = (
        "±: half of the mean's 95 % confidence interval (Student's t); sd: standard deviation; worse: over seeds, by "
        "more than chance explains"
    )
    return tables


_Columns = tuple[Sequence[str], Sequence[Sequence[str]]]


def _tables(title: str, left: _Columns, right: _Columns, width: int) -> list[Table]:
    """Return a table, or several with the same columns on their left: no number is cut, and as many columns of numbers
    as fit into `width` characters are beside each other."""
    titles = [textwrap.fill(name, _TITLE_WIDTH, break_long_words=False, break_on_hyphens=False) for name in right[0]]
    whole_widths = _widths(*left)
    has_room = sum(whole_widths) + _BORDER * len(whole_widths) <= _MOST_OF_NAMES * width
    left_widths = whole_widths if has_room else [min(each, _SETTING_WIDTH) for each in whole_widths]
    parts: list[list[int]] = [[]]
    free = width - sum(left_widths) - _BORDER * (len(left_widths) + 1)
    used = 0
    for place, each in enumerate(_widths(titles, right[1])):
        if parts[-1] and used + each + _BORDER > free:
            parts.append([])
            used = 0
        parts[-1].append(place)
        used += each + _BORDER
    tables = []
    for part in parts:
        table = make_table(title, left[0], [titles[place] for place in part])
        for column, least in zip(table.columns, left_widths, strict=False):
            column.min_width, column.overflow = least, "fold"
        for column in table.columns[len(left_widths) :]:
            column.no_wrap = True
        for own, numbers in zip(left[1], right[1], strict=True):
            table.add_row(*own, *(numbers[place] for place in part))
        tables.append(table)
    return tables


def _widths(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the length of the longest line of each column."""
    columns = zip(titles, *rows, strict=True)
    return [max(len(line) for text in column for line in text.splitlines() or [""]) for column in columns]


def _settings(varied: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return titles and cells of the settings that differ. Those that only some runs have share a column."""
    rare = [key for key in keys if not all(key in each for each in varied)]
    if len(rare) < 2:
        rare = []
    own = [key for key in keys if key not in rare]
    cells = [
        [
            *(str(each.get(key, "")) for key in own),
            *(["\n".join(shown({key: each[key]}) for key in rare if key in each)] if rare else []),
        ]
        for each in varied
    ]
    return [*own, *(["also"] if rare else [])], cells


def write_configurations(sweep: Path, configurations: Sequence[Configuration]) -> None:
    """Write `configurations.parquet` and `configurations.csv` into a sweep's folder: as `result_rows` has them."""
    rows = result_rows([(each.name, each.varied, each.results) for each in configurations])
    _write(sweep, "configurations", rows)


def write_results(sweep: Path) -> pa.Table:
    """Write `results.parquet` and `results.csv` into a sweep's folder: a row for each run that ended.

    The columns are what the sweep varies, by the settings' names; how the run ended; and every number of its
    result.json, with names that begin with "result.": `cache.device_bytes` is asked for, `result.cache.device_bytes`
    was used. A list is text, as in the sweep's file: CSV files have no lists, and Arrow groups by none.
    """
    return _write(sweep, "results", [_row(sweep, outcome) for outcome in read_outcomes(sweep)])


def _write(sweep: Path, file: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.table({name: _column([row.get(name) for row in rows]) for name in names})
    for ending, write in (("parquet", parquet.write_table), ("csv", csv.write_csv)):
        with whole_file(sweep / f"{file}.{ending}") as partial:
            write(table, partial)
    return table


def _row(sweep: Path, outcome: Outcome) -> dict[str, Any]:
    values = dataclasses.asdict(outcome)
    varied = {key: cell(key, value) for key, value in values.pop("varied").items()}
    found = RunResult.find(run_folder(sweep, outcome.name))
    entries = {} if found is None else found.to_dict()
    result = flat({key: value for key, value in entries.items() if key not in _LEFT_OUT})
    return {**varied, **values, **{f"result.{key}": each for key, each in result.items() if _is_number(key, each)}}


def _is_number(key: str, value: Any) -> bool:
    """Return whether a value of result.json is a column: no list, and not of one table."""
    return not isinstance(value, (list, tuple)) and "tables" not in key.split(".")


def _column(values: list[Any]) -> pa.Array:
    """Return a column; values of several types become text."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array([None if value is None else str(value) for value in values])
