"""The parts of a page and their look: sections, figures with their legend, tables."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import plotly.graph_objects as go
import plotly.io
from plotly.subplots import make_subplots

# Okabe and Ito's colours, which also readers with a colour vision deficiency can tell apart; then dashes.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("solid", "dash", "dot", "dashdot")
_PATTERNS = ("", "/", "x", ".")
# A drag zooms and a double click shows all again, so few of Plotly's buttons are left.
_BUTTONS_LEFT_OUT = ["zoom2d", "pan2d", "select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"]
Scale = tuple[tuple[float, str], ...]
#: Colours of heat maps: dark letters can be read on each. Of rates the low ones draw the eye.
RATES: Scale = ((0.0, "#f6c3b0"), (0.25, "#ffe9a8"), (0.5, "#b9e3b0"), (0.75, "#86cfc9"), (1.0, "#5aa6d6"))
AMOUNTS: Scale = ((0.0, "#cfdfe9"), (0.5, "#f3dda6"), (1.0, "#ef9f5f"))
_COLOUR_BAR = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "len": 0.9} | {
    "thickness": 10,
    "tickangle": 0,
}
_COLUMNS_WITH_TEXT = 16
#: Characters in a line of a name beside a bar: on 480 pixels half of the figure is left.
_NAME_WIDTH = 28


class Key(NamedTuple):
    """An entry of a figure's legend.

    Attributes:
        shape: "line", "bar", or a marker.
        style: the line's dash, or the bar's pattern.
    """

    name: str
    shape: str
    colour: str
    style: str


@dataclass(frozen=True)
class PageFigure:
    """A figure; `note` says what it shows, and `terms` what words in it mean."""

    title: str
    drawn: go.Figure
    note: str = ""
    terms: Mapping[str, str] = field(default_factory=dict)

    @property
    def keys(self) -> list[Key]:
        """The legend, which the page draws beside the figure: there it has room for long names, on any screen."""
        if self.drawn.layout.showlegend is False:
            return []
        found = {trace.name: trace for trace in self.drawn.data if trace.name and trace.showlegend is not False}
        keys = [_key(trace) for trace in found.values()]
        return keys if len(keys) > 1 or self.drawn.layout.showlegend else []

    def html(self, name: str) -> str:
        """Return the figure as HTML, without Plotly's own code; `name` is its element's id."""
        drawn = go.Figure(self.drawn).update_layout(showlegend=False)
        config = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": _BUTTONS_LEFT_OUT}
        return str(plotly.io.to_html(drawn, config=config, full_html=False, include_plotlyjs=False, div_id=name))


def _key(trace: Any) -> Key:
    name = html.unescape(trace.name)
    if trace.type == "bar":
        return Key(name, "bar", trace.marker.color, trace.marker.pattern.shape or "")
    if "lines" in trace.mode:
        return Key(name, "line", trace.line.color, trace.line.dash or "solid")
    return Key(name, trace.marker.symbol or "circle", trace.marker.color, "")


@dataclass(frozen=True)
class PageTable:
    """A table of texts; `note` says what it shows, and `terms` what words in it mean.

    Attributes:
        is_folded: a click opens it.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    terms: Mapping[str, str] = field(default_factory=dict)
    is_folded: bool = False


@dataclass(frozen=True)
class PagePicture:
    """A picture that is there already, as the bytes of a PNG."""

    title: str
    png: bytes
    note: str = ""
    terms: Mapping[str, str] = field(default_factory=dict)
    keys: Sequence[Key] = ()

    def html(self, name: str) -> str:
        """Return the picture as HTML; `name` is its element's id."""
        source = f"data:image/png;base64,{base64.b64encode(self.png).decode()}"
        return f'<img id="{name}" alt="{html.escape(self.title)}" style="width: 100%; background: #fff" src="{source}">'


@dataclass(frozen=True)
class Section:
    """A part of the page: its text, one paragraph each, then its tables and figures.

    Attributes:
        has_curves: its figures obey the page's controls: the x axis, smoothing, the scale.
    """

    title: str
    parts: Sequence[PageFigure | PageTable | PagePicture] = ()
    text: Sequence[str] = ()
    has_curves: bool = False


def new_figure(*panels: str, height: int = 340, columns: int | None = None, names_rows: bool = False) -> go.Figure:
    """Return an empty figure with a panel for each title, in one row unless there are fewer columns.

    The page's script places the panels by the width of the screen: as many in a row as have room, `height` each. With
    `names_rows`, they have the same names on their y axes, which stand on the left.
    """
    columns = columns or max(1, len(panels))
    rows = -(-len(panels) // columns) or 1
    figure = make_subplots(rows=rows, cols=columns, subplot_titles=[text(panel) for panel in panels])
    figure.update_layout(
        template="plotly_white",
        height=height * rows,
        margin={"l": 60, "r": 16, "t": 36 if panels else 12, "b": 48},
        font={"family": "system-ui, sans-serif", "size": 13, "color": "#333333"},
        colorway=_COLOURS,
        meta={"columns": columns, "panels": len(panels), "height": height, "names_rows": names_rows},
        modebar={"orientation": "v"},
    )
    figure.update_annotations(font_size=14)
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


def name_beside(value: str) -> str:
    """Return a name for an axis, in lines that leave room for the figure on a narrow screen.

    >>> name_beside("cache.ratio=0.1, dense_optimizer.lr=0.01")
    'cache.ratio=0.1,<br>dense_optimizer.lr=0.01'
    >>> name_beside("embedding_optimizer.kind=rowwise_adagrad")
    'embedding_optimizer.kind=<br>rowwise_adagrad'
    """
    lines = [""]
    for word in value.split(" "):
        for part in re.split("(?<==)", f"{word} ") if len(word) > _NAME_WIDTH else [f"{word} "]:
            if lines[-1] and len(lines[-1] + part.rstrip()) > _NAME_WIDTH:
                lines.append("")
            lines[-1] += part
    return "<br>".join(text(line.rstrip()) for line in lines)


def lines_of(names: Sequence[str]) -> int:
    """Return the lines that names beside bars take, below each other."""
    return sum(1 + name.count("<br>") for name in names)


def unit_of(counts: Sequence[float]) -> tuple[str, int]:
    """Return the unit in which the largest of some counts of bytes is at least 1, and its bytes.

    >>> unit_of([3 * 2**20, 2**31])
    ('GiB', 1073741824)
    """
    units = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20}
    return next(((unit, each) for unit, each in units.items() if max(counts, default=0) >= each), ("KiB", 2**10))


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    shades: Sequence[Sequence[float | None]],
    cells: Sequence[Sequence[str]],
    hover: Sequence[Sequence[str]],
    labels: Mapping[float, str],
    ends: tuple[float, float],
    scale: Scale = RATES,
) -> go.Figure:
    """Return a heat map, [rows, columns], the first row above.

    Args:
        shades: None leaves a cell grey.
        cells: written into them where there is room.
        hover: what a pointer shows beside the names of row and column.
        labels: of the `scale` of colours, which goes from one of the `ends` to the other.
    """
    names = [*map(name_beside, rows)]
    lines = max((lines_of([name]) for name in names), default=1)
    figure = new_figure(height=120 + (5 + 17 * lines) * len(rows))
    drawn = go.Heatmap(
        z=shades,
        x=[*columns],
        y=names,
        zmin=ends[0],
        zmax=ends[1],
        colorscale=scale,
        colorbar={**_COLOUR_BAR, "tickvals": [*labels], "ticktext": [*labels.values()]},
        xgap=2,
        ygap=2,
        text=cells,
        customdata=hover,
        texttemplate="%{text}" if len(columns) <= _COLUMNS_WITH_TEXT else "",
        textfont={"color": "#222222"},
        hovertemplate="%{y}<br>%{x}<br>%{customdata}<extra></extra>",
        hoverongaps=False,
    )
    figure.add_trace(drawn)
    figure.update_layout(margin={"t": 64})
    figure.update_yaxes(type="category", autorange="reversed", automargin=True, showgrid=False, dtick=1)
    figure.update_xaxes(type="category", automargin=True, showgrid=False)
    return figure
