"""A sweep's results: every configuration with the spread over its repeats, scaling, and failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import plotly.graph_objects as go

from embershard.extras.report_page.parts import (
    PageFigure,
    PageTable,
    Section,
    colour,
    lines_of,
    look,
    name_beside,
    new_figure,
    text,
)
from embershard.metrics.figures import main_names, more_is_better, title_of
from embershard.sweeps.experiments import shown
from embershard.sweeps.outcomes import Outcome
from embershard.sweeps.spread import (
    Configuration,
    Efficiency,
    Spread,
    against_best,
    best_sentence,
    main_figures,
    spread_text,
)
from embershard.units import size

_SPEED = "samples_per_second"
_RANKS = "ranks"


def sweep_section(path: Path, configurations: Sequence[Configuration]) -> Section:
    """Return the section of a sweep."""
    parts: list[PageFigure | PageTable] = [_comparison(configurations)]
    finished = [each for each in configurations if each.spread(_SPEED)]
    best = best_sentence(configurations)
    said = [f"{best}."] if best else []
    judged = main_names((result.quality for each in configurations for result in each.results), "sweeps")
    dotted = {name: title_of(name) for name in judged} | {_SPEED: "samples/s"}
    shown = {name: title for name, title in dotted.items() if any(each.spread(name) for each in finished)}
    if shown:
        parts.append(_spread(finished, shown))
    by_rest: dict[str, list[Configuration]] = {}  # those that differ in their number of ranks alone, in its order
    for each in sorted(finished, key=lambda each: each.outcomes[0].ranks):
        by_rest.setdefault(each.without(_RANKS), []).append(each)
    lines = [line for line in by_rest.values() if len(line) > 1]
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


def _comparison(configurations: Sequence[Configuration]) -> PageTable:
    names = configurations[0].differing if configurations else ()
    figures = main_figures(result for each in configurations for result in each.results)
    rows, (beside, verdicts) = [], against_best(configurations)
    quality = [name for name in figures if more_is_better(name) is not None]
    others = [name for name in figures if name not in quality]
    for each, verdict in zip(configurations, verdicts, strict=True):
        of = {name: spread_text(each.results, name, form).replace(" (", "\n(") for name, (_, form) in figures.items()}
        caches = [result.cache for result in each.results if result.cache is not None]
        rows.append(
            (
                *(str(each.varied.get(name, "")) for name in names),
                f"{len(each.folders)} of {len(each.outcomes)}",
                *(of[name] for name in quality),
                verdict.replace(" (", "\n("),
                *(of[name] for name in others),
                size(caches[0].device_bytes) if caches else "",
            )
        )
    note = "Means over the repeats that finished. Runs that differ in their seeds alone are repeats."
    terms = {
        "±": "Half of the mean's 95 % confidence interval, by Student's t.",
        "sd": "Standard deviation.",
        "finished": "Of the repeats that ended.",
        "beside the best": "Whether runs with the same seeds differ by more than chance explains, and the interval in "
        "which their difference is. All of these hold together in 95 of 100 cases.",
        "hits": "Share of lookups whose row was on the device.",
        "device": "Bytes of the caches' slots and maps on all ranks.",
    }
    of_quality, of_others = ([figures[name][0] for name in own] for own in (quality, others))
    header = (*names, "finished", *of_quality, beside, *of_others, "device")
    return PageTable("Comparison", header, rows, note, terms)


def _spread(configurations: Sequence[Configuration], figures: Mapping[str, str]) -> PageFigure:
    """Draw every run, and means with their intervals: a panel for each of these figures, given by name and title."""
    names = [name_beside(each.name) for each in configurations]
    figure = new_figure(*figures.values(), height=120 + 18 * lines_of(names), names_rows=True)
    dot = {"color": colour(5), "size": 9}
    bar = {"color": "#000000", "symbol": "line-ns-open", "size": 16, "line": {"width": 2}}
    for panel, figure_name in enumerate(figures, 1):
        spreads = [each.spread(figure_name) or Spread(()) for each in configurations]
        repeats = [(name, value) for name, spread in zip(names, spreads, strict=True) for value in spread.values]
        means = [(name, spread) for name, spread in zip(names, spreads, strict=True) if spread.values]
        place, own = {"row": 1, "col": panel}, {"mode": "markers", "hovertemplate": "%{y}: %{x:,.5~g}"}
        x, y = [value for _, value in repeats], [name for name, _ in repeats]
        figure.add_trace(go.Scatter(x=x, y=y, name="a run", marker=dot, **own), **place)
        x, y = [spread.mean for _, spread in means], [name for name, _ in means]
        intervals = {"array": [spread.interval or 0.0 for _, spread in means], "color": "#000000", "thickness": 1.5}
        mean = go.Scatter(x=x, y=y, name="mean and its 95 % interval", marker=bar, error_x=intervals, **own)
        figure.add_trace(mean, **place)
    figure.update_xaxes(nticks=5)  # more would touch each other
    figure.update_yaxes(type="category", autorange="reversed", automargin=True)
    note = "Repeats with one seed train one model, and have one quality."
    return PageFigure("Quality and speed, every run", figure, note)


def _scaling(lines: Sequence[Sequence[Configuration]]) -> PageFigure:
    figure = new_figure("samples/s", "efficiency")
    for number, line in enumerate(lines):
        ranks = [each.outcomes[0].ranks for each in line]
        spreads = [each.spread(_SPEED) or Spread(()) for each in line]
        means = [each.mean for each in spreads]
        ideal = [means[0] * each / ranks[0] for each in ranks]
        bars = {
            "array": [max(each.values) - each.mean for each in spreads],
            "arrayminus": [each.mean - min(each.values) for each in spreads],
        }
        name, style = text(line[0].without(_RANKS)), {"color": colour(number)}
        group = {"legendgroup": name, "x": ranks}
        speed = go.Scatter(y=means, error_y=bars, mode="lines+markers", name=name, line=look(number), **group)
        dotted = {**style, "dash": "dot", "width": 1}
        perfect = go.Scatter(y=ideal, mode="lines", name=f"{name}: ideal", line=dotted, showlegend=False, **group)
        shares = [
            Efficiency.of(spread, count, spreads[0], ranks[0]) for spread, count in zip(spreads, ranks, strict=True)
        ]
        bars = {"array": [each.half or 0.0 for each in shares]}
        own = {"y": [each.value for each in shares], "error_y": bars, "line": look(number), "showlegend": False}
        efficiency = go.Scatter(mode="lines+markers", name=name, **own, **group)
        figure.add_traces([speed, perfect, efficiency], rows=[1, 1, 1], cols=[1, 1, 2])
    figure.add_hline(y=1, line={"color": "#888888", "dash": "dot", "width": 1}, row=1, col=2)
    figure.update_xaxes(title="ranks", tickvals=sorted({each.outcomes[0].ranks for line in lines for each in line}))
    figure.update_yaxes(rangemode="tozero", row=1, col=1)
    figure.update_yaxes(tickformat=".0%", rangemode="tozero", row=1, col=2)
    note = (
        "Means over repeats. Bars of samples/s go from the least to the greatest. Dotted: the speed of the fewest "
        "ranks times the ranks. Efficiency: samples/s over that, with its 95 % interval where both have repeats."
    )
    return PageFigure("Scaling", figure, note)


def _failures(outcomes: Sequence[Outcome]) -> PageTable:
    rows = [
        (
            shown(outcome.varied),
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
