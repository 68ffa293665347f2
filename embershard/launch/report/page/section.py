"""`Section`, `Figure` and `Table`: the parts of a page; and the look that all figures have in common."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import plotly.io
from plotly.subplots import make_subplots

# Okabe and Ito's colours, which also readers with a colour vision deficiency can tell apart; then dashes.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("solid", "dash", "dot", "dashdot")
_PATTERNS = ("", "/", "x", ".")


@dataclass(frozen=True)
class Figure:
    """A figure; `note` says what it shows."""

    title: str
    drawn: go.Figure
    note: str = ""

    def html(self, name: str) -> str:
        """Return the figure as HTML, without Plotly's own code; `name` is its element's id."""
        config = {"displaylogo": False, "responsive": True}
        return str(plotly.io.to_html(self.drawn, config=config, full_html=False, include_plotlyjs=False, div_id=name))


@dataclass(frozen=True)
class Table:
    """A table of texts; `note` says what it shows."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page: its text, one paragraph each, then its tables and figures."""

    title: str
    parts: Sequence[Figure | Table] = ()
    text: Sequence[str] = ()


def new_figure(*panels: str, height: int = 380, columns: int | None = None) -> go.Figure:
    """Return an empty figure with a panel for each title, in one row unless there are fewer columns."""
    columns = columns or max(1, len(panels))
    rows = -(-len(panels) // columns) or 1
    figure = make_subplots(rows=rows, cols=columns, subplot_titles=[text(panel) for panel in panels])
    figure.update_layout(
        template="plotly_white",
        height=height * rows,
        margin={"l": 70, "r": 50, "t": 60 if panels else 40, "b": 50},
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0 + 0.12 / rows, "x": 0},
        colorway=_COLOURS,
        modebar={"orientation": "v"},
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
