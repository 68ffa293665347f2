"""The parts of a page and their look; and its runs, by name: a summary, and their settings."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import plotly.io
from plotly.subplots import make_subplots

from embershard.cache.totals import RunCaches
from embershard.errors import ConfigError, ShardingError
from embershard.metrics.figures import form_of, main_names, title_of
from embershard.reports.run_folder import RunFolder
from embershard.run_result import RunResult, held_out_warning, steady_mark
from embershard.units import number, size

# Okabe and Ito's colours, which also readers with a colour vision deficiency can tell apart; then dashes.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("solid", "dash", "dot", "dashdot")
_PATTERNS = ("", "/", "x", ".")
# A drag zooms and a double click shows all again, so few of Plotly's buttons are left.
_BUTTONS_LEFT_OUT = ["zoom2d", "pan2d", "select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"]


@dataclass(frozen=True)
class PageFigure:
    """A figure; `note` says what it shows."""

    title: str
    drawn: go.Figure
    note: str = ""

    @property
    def least_width(self) -> int:
        """The pixels that the panels beside each other need; on a narrower screen the figure is moved."""
        return 360 + 240 * (self.drawn.layout.meta["columns"] - 1)

    def html(self, name: str) -> str:
        """Return the figure as HTML, without Plotly's own code; `name` is its element's id."""
        config = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": _BUTTONS_LEFT_OUT}
        return str(plotly.io.to_html(self.drawn, config=config, full_html=False, include_plotlyjs=False, div_id=name))


@dataclass(frozen=True)
class PageTable:
    """A table of texts; `note` says what it shows."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page: its text, one paragraph each, then its tables and figures."""

    title: str
    parts: Sequence[PageFigure | PageTable] = ()
    text: Sequence[str] = ()


def new_figure(*panels: str, height: int = 380, columns: int | None = None) -> go.Figure:
    """Return an empty figure with a panel for each title, in one row unless there are fewer columns."""
    columns = columns or max(1, len(panels))
    rows = -(-len(panels) // columns) or 1
    above = 28 if panels else 8  # pixels between the figure and its legend: room for the panels' titles
    figure = make_subplots(rows=rows, cols=columns, subplot_titles=[text(panel) for panel in panels])
    figure.update_layout(
        template="plotly_white",
        height=height * rows,
        margin={"l": 70, "r": 50, "t": 60 if panels else 40, "b": 50},
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0 + above / (height * rows - 110), "x": 0},
        colorway=_COLOURS,
        meta={"columns": columns},
        modebar={"orientation": "v"},  # beside the figure: above it, the legend would run into it
    )
    return figure


def look(number: int) -> dict[str, str]:
    """Return colour and dash of the line of the run with this number."""
    return {"color": colour(number), "dash": _DASHES[number // len(_COLOURS) % len(_DASHES)]}


def colour(number: int) -> str:
    """Return the colour of the run with this number."""
    return _COLOURS[number % len(_COLOURS)]


def fill(number: int) -> dict[str, Any]:
    """Return colour and pattern of the bars of the run with this number."""
    return {"color": colour(number), "pattern": {"shape": _PATTERNS[number // len(_COLOURS) % len(_PATTERNS)]}}


def text(value: str) -> str:
    """Return a text for a figure, where Plotly would read some HTML; a page's other texts are escaped by Jinja."""
    return html.escape(value, quote=False)


@dataclass(frozen=True)
class Run:
    """A run under the name that the page has for it.

    Attributes:
        number: its place on the page, which gives its colour.
    """

    name: str
    number: int
    folder: RunFolder

    @property
    def exchange(self) -> str:
        """What its ranks exchange: "pooled" or "rows", which says what a lookup of a cache is; "both" by tables."""
        try:
            if self.folder.has_plan:
                found = {table.exchange for table in self.folder.plan(None).tables if table.kernel == "cached"}
                return found.pop() if len(found) == 1 else "both" if found else "pooled"
            return str(self.folder.settings().get("sharding.exchange", "pooled"))
        except (ConfigError, ShardingError):
            return "not known"

    @property
    def result(self) -> RunResult | None:
        """What the run gave; None where it has not ended."""
        return self.folder.result

    @property
    def cache(self) -> RunCaches | None:
        """What the caches did; None in a run without caches, or that has not ended."""
        return None if self.result is None else self.result.cache


#: Why hit rates of runs with different exchanges do not stand in one chart.
HITS_DIFFER = (
    'Hits of runs with different sharding.exchange do not compare: with "pooled" every id of every sample is a lookup, '
    'with "rows" a row is looked up once per rank and batch, however many samples have it.'
)


def summary(runs: Sequence[Run]) -> Section:
    """Return the section of all runs' results."""
    ended = [(run.name, run.result) for run in runs if run.result is not None]
    names = main_names((result.quality for _, result in ended), "page")
    header = ["run", "ranks", "steps", "samples", "samples/s", "step ms, median", "p95", "training loss"]
    header += [*map(title_of, names), "best, at step", "hits", "caches", "host", "sent"]
    note = (
        "not steady yet: too short for the speed of a long run; step ms: of a rank; half of the steps, and 95 % (p95), "
        "take less; training loss: mean since the last report; "
        f"{', '.join(map(title_of, names))}: of the held-out samples, at the last step; best: the best evaluation, "
        "where the run follows it, by its figure; hits: share of lookups; caches and host: bytes of slots and maps on "
        "the devices, and of their rows and scores on the hosts, of all ranks at the end; sent: to other ranks, by a "
        "rank in a step."
    )
    exchanges = {run.exchange for run in runs if run.cache}
    if len(exchanges) > 1:
        note += f" {HITS_DIFFER} " + "; ".join(f"{run.name}: {run.exchange}" for run in runs if run.cache) + "."
    going = [run.name for run in runs if run.result is None]
    text = [f"Not ended, so without a result: {', '.join(going)}."] if going else []
    if warning := held_out_warning(result for _, result in ended):
        text.append(f"{warning}.")
    text += [
        f"{name}: speed, step ms, hits, sent and the sections of caches are since the resume at step "
        f"{result.resumed_at:,}; dotted lines mark it. The training's {title_of(names[0])} starts anew there."
        for name, result in ended
        if result.resumed_at
    ]
    tables = [PageTable("Results", header, [_summary_row(run, names) for run in runs], note)]
    closing = {name: {title: value for title, value, _ in result.closing_rows()} for name, result in ended}
    titles = dict.fromkeys(title for of_run in closing.values() for title in of_run)
    rows = [(title, *(of_run.get(title, "") for of_run in closing.values())) for title in titles]
    if rows:
        tables.append(PageTable("As each run's closing table has it", ("", *closing), rows))
    return Section("Runs", tables, text)


def _summary_row(run: Run, names: Sequence[str]) -> tuple[str, ...]:
    result, cache = run.result, run.cache
    if result is None:
        reports = run.folder.reports("train")
        return (run.name, "", str(reports[-1]["step"]) if reports else "0", *[""] * (10 + len(names)))
    sent, best = result.sent_bytes.over(result.parts).in_training, result.best
    return (
        run.name,
        str(result.world_size),
        f"{result.steps:,}",
        f"{result.samples:,}",
        number(result.samples_per_second, ",.0f") + steady_mark(result),
        number(result.step_ms.p50, ".2f"),
        number(result.step_ms.p95, ".2f"),
        number(result.loss, ".5f"),
        *(number(result.quality.get(name), form_of(name)) for name in names),
        f"{title_of(best.metric)} {number(best.value, form_of(best.metric))}, {best.step:,}" if best else "",
        number(cache.hit_rate_lookups, ".2%") if cache else "no cache",
        size(cache.device_bytes) if cache else "",
        size(cache.host_bytes) if cache else "",
        size(sent) if sent else "0",
    )


#: Those that a page has of every run, where any has a value.
_MAIN_SETTINGS = (
    *("data.kind", "data.path", "data.split", "held out", "data.seed", "train.seed"),
    *("model.arch", "model.build", "model.embedding_dim", "ranks", "train.batch_size", "train.global_batch_size"),
    *("train.epochs", "train.max_steps", "embedding_optimizer.kind", "embedding_optimizer.lr", "dense_optimizer.kind"),
    *("dense_optimizer.lr", "cache.enabled", "cache.ratio", "cache.device_bytes", "cache.policy", "sharding.mode"),
)


def settings(runs: Sequence[Run]) -> Section:
    """Return the section of the runs' main settings, and of those that are not the same in all."""
    found, text = [], []
    for run in runs:
        try:
            beside = dict.fromkeys(("ranks", "held out"), "not known")
            if (result := run.result) is not None:
                beside = {"ranks": str(result.world_size), "held out": str(result.held_out or "not known")}
            found.append((run, {**beside, **run.folder.settings()}))
        except ConfigError as error:
            text.append(f"Left out: {error}")
    keys = dict.fromkeys([*_MAIN_SETTINGS, *(key for _, settings in found for key in settings)])
    rows = [(key, *(str(settings.get(key, "none")) for _, settings in found)) for key in keys]
    main = [row for row in rows if row[0] in _MAIN_SETTINGS and set(row[1:]) - {"none"}]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    if len(runs) > 1 and not differing:
        text.append("No setting differs.")
    header = ("setting", *(run.name for run, _ in found))
    tables = [PageTable("Main settings", header, main), PageTable("Settings that differ", header, differing)]
    return Section("Settings", [table for table in tables if table.rows], text)
