"""A study of scaling as a picture: speed that was measured, predicted and simulated; bytes, memory, hits, quality."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from embershard.extras.scale_out.points import Point
from embershard.metrics.figures import main_names, title_of

_KINDS = ("ids", "embeddings", "gradients", "dense_all_reduce", "other")
_MOST_LABELS = 9
_Value = Callable[[Point], "float | None"]


def scaling_figure(points: Sequence[Point]) -> Figure:
    """Draw all points of a study."""
    figure = Figure(figsize=(15, 9), layout="constrained")
    title = "Dots with bars: measured, mean and 95 % interval. Crosses: predicted by the run's plan."
    if any(each.source == "simulated" for each in points):
        machines = {each.configuration.partition("simulated on ")[2] for each in points if each.source == "simulated"}
        on = ", ".join(sorted(machines))
        title += f" Dashed, with its interval: SIMULATED on {on}, an estimate that nothing here measured."
    figure.suptitle(title, ha="left", x=0.01, fontsize="medium")
    (weak, strong, share), (sent, memory, quality) = figure.subplots(2, 3)
    names = list(dict.fromkeys(_base(each) for each in points))
    colours = {name: f"C{number % 10}" for number, name in enumerate(names)}
    _draw_speed(weak, [each for each in points if each.scaling == "weak"], colours, "Weak scaling")
    _draw_speed(strong, [each for each in points if each.scaling == "strong"], colours, "Strong scaling")
    _draw_share(share, points, colours)
    measured = [each for each in points if each.source == "measured"]
    _draw_sent(sent, measured, names)
    _draw_lines(memory, measured, colours, lambda each: _mebibytes(each.cache_bytes), "caches of the fullest rank, MiB")
    hits = memory.twinx()
    for name in names:
        own = [each for each in measured if _base(each) == name and each.hit_rate is not None]
        hits.plot([each.ranks for each in own], [each.hit_rate for each in own], ":", color=colours[name])
    hits.yaxis.set_major_formatter(PercentFormatter(1))
    hits.set(ylabel="hit rate of lookups, dotted")
    if judged := main_names([each.quality for each in measured if each.quality], "sweeps"):
        title = f"{title_of(judged[0])} of held-out samples"
        _draw_lines(quality, measured, colours, lambda each: each.quality.get(judged[0]), title)
    return figure


def _base(point: Point) -> str:
    return f"{point.scaling}, {point.configuration.partition('; simulated')[0]}"


def _mebibytes(count: int | None) -> float | None:
    return None if count is None else count / 2**20


def _draw_speed(axes: Axes, points: Sequence[Point], colours: dict[str, str], title: str) -> None:
    axes.set_title(f"{title}: samples per second of all ranks", loc="left", fontsize="medium")
    if not points:
        axes.text(0.5, 0.5, "no runs", ha="center", transform=axes.transAxes)
        return
    for name in dict.fromkeys(map(_base, points)):
        own = [each for each in points if _base(each) == name]
        style: dict[str, Any] = {"color": colours[name]}
        measured = [each for each in own if each.source == "measured"]
        ranks, speeds = [each.ranks for each in measured], [each.samples_per_second for each in measured]
        bars = [[speed - max(low, speed / 9) for speed, low in zip(speeds, _ends(measured, "low"), strict=True)]]
        bars += [[high - speed for speed, high in zip(speeds, _ends(measured, "high"), strict=True)]]
        axes.errorbar(ranks, speeds, bars, fmt="o-", capsize=3, label=name.partition(", ")[2], **style)
        ideal = [speeds[0] * each / ranks[0] for each in ranks]
        axes.plot(ranks, ideal, linewidth=0.7, linestyle=":", **style)
        planned = [each for each in measured if each.predicted_per_second is not None]
        axes.plot(
            [each.ranks for each in planned], [each.predicted_per_second or 0.0 for each in planned], "x", **style
        )
        simulated = [each for each in own if each.source == "simulated"]
        ranks = [each.ranks for each in simulated]
        axes.plot(ranks, [each.samples_per_second for each in simulated], "--", **style)
        axes.fill_between(ranks, _ends(simulated, "low"), _ends(simulated, "high"), alpha=0.12, linewidth=0, **style)
    axes.set(yscale="log", xlabel="ranks (logarithmic); dotted: ideal")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda count, _: ""))
    _finish(axes, points)


def _ends(points: Sequence[Point], end: str) -> list[float]:
    """Return an end of each point's interval; of a point without one its speed."""
    return [each.samples_per_second if getattr(each, end) is None else getattr(each, end) for each in points]


def _draw_share(axes: Axes, points: Sequence[Point], colours: dict[str, str]) -> None:
    for name, colour in colours.items():
        for source, form in (("measured", "o-"), ("simulated", "--")):
            own = [each for each in points if _base(each) == name and each.source == source]
            label = f"{list(colours).index(name) + 1}: {name}" if source == "measured" else None
            axes.plot([each.ranks for each in own], [each.efficiency for each in own], form, color=colour, label=label)
    axes.axhline(1, color="grey", linewidth=0.7, linestyle=":")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_title("Efficiency: samples/s of a rank, of those on the fewest", loc="left", fontsize="medium")
    axes.set(xlabel="ranks (logarithmic)", ylim=(0, None))
    _finish(axes, points)


def _draw_sent(axes: Axes, points: Sequence[Point], names: Sequence[str]) -> None:
    """Draw a bar for each measured point, named by its ranks and the number of its configuration."""
    labels = [f"{each.ranks}\n{names.index(_base(each)) + 1}" for each in points]
    places, bottom = range(len(points)), [0.0] * len(points)
    for kind in _KINDS:
        heights = [each.sent_bytes.get(kind, 0.0) / 2**10 for each in points]
        if any(heights):
            axes.bar(places, heights, bottom=bottom, label=kind.replace("_", " "))
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    planned = [(place, each) for place, each in zip(places, points, strict=True) if each.predicted_sent_bytes]
    sums = [sum(each.predicted_sent_bytes.values()) / 2**10 for _, each in planned]
    axes.plot([place for place, _ in planned], sums, "kx", label="predicted")
    axes.set_xticks(places, labels, fontsize=7)
    axes.set(ylabel="KiB", xlabel="ranks; below: number of the configuration")
    axes.set_title("Sent by a rank in a step, by kind", loc="left", fontsize="medium")
    axes.legend(fontsize=7)


def _draw_lines(axes: Axes, points: Sequence[Point], colours: dict[str, str], value: _Value, title: str) -> None:
    for name, colour in colours.items():
        own = [(each.ranks, number) for each in points if _base(each) == name and (number := value(each)) is not None]
        axes.plot([ranks for ranks, _ in own], [number for _, number in own], "o-", color=colour)
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set(xlabel="ranks (logarithmic)")
    _finish(axes, points)


def _finish(axes: Axes, points: Sequence[Point]) -> None:
    ranks = sorted({each.ranks for each in points})
    axes.set(xscale="log")
    shown = ranks[:: -(-len(ranks) // _MOST_LABELS)]
    axes.set_xticks(shown, [f"{each:,}" for each in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(True, linewidth=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)
