"""A study of scaling as a picture: speed, efficiency, bytes, memory, parts of a step, hits and quality over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from embershard.extras.scale_out.points import HELD, Point, Scaling
from embershard.metrics.figures import main_names, title_of
from embershard.planning.cost.rates import PARTS
from embershard.planning.simulate.step_replay import STRAGGLERS
from embershard.stages import Stage

_KINDS = ("ids", "embeddings", "gradients", "dense_all_reduce", "sync")
_MOST_LABELS = 9
_RANKS = "ranks (logarithmic)"
_Value = Callable[[Point], "float | None"]


def scaling_figure(points: Sequence[Point]) -> Figure:
    """Draw all points of a study."""
    figure = Figure(figsize=(20, 13), layout="constrained")
    measured = [each for each in points if each.source == "measured"]
    simulated = [each for each in points if each.source == "simulated"]
    title = "Dots with bars: measured, mean and 95 % interval. Crosses: planned, before the runs."
    if simulated:
        machines = sorted({each.configuration.partition("simulated on ")[2] for each in simulated})
        on = ", ".join(machines)
        title += f" Dashed, with its interval: SIMULATED on {on}, an estimate that nothing here measured."
    figure.suptitle(title, ha="left", x=0.01, fontsize="medium")
    (weak, strong, share, key), (sent, device, process, quality), (planned, stages, parts, hits) = figure.subplots(3, 4)
    names = list(dict.fromkeys(map(_base, points)))
    colours = {name: f"C{number % 10}" for number, name in enumerate(names)}
    _draw_speed(weak, points, colours, "weak")
    _draw_speed(strong, points, colours, "strong")
    _draw_share(share, points, colours)
    _draw_key(key, colours)
    _draw_sent(sent, measured, names)
    _draw_memory(device, process, measured, colours)
    if judged := main_names([each.quality for each in measured if each.quality], "sweeps"):
        title = f"{title_of(judged[0])} of held-out samples"
        _draw_lines(quality, measured, colours, lambda each: each.quality.get(judged[0]), title)
    else:
        _say(quality, "Quality of held-out samples", "nothing was evaluated")
    _draw_parts(planned, measured, names, "predicted_parts_ms", "Planned parts of a step, slowest rank, ms", "no plans")
    none = "no steps were traced:\nprofile_steps of [scale_out]"
    _draw_parts(stages, measured, names, "parts_ms", "Measured stages of a step, ms", none)
    none = "nothing was simulated:\nsimulate_to of [scale_out]"
    _draw_parts(parts, simulated, names, "predicted_parts_ms", "SIMULATED parts of a step, ms", none)
    title = "Hits of lookups"
    _draw_lines(hits, measured, colours, lambda each: each.hit_rate, title, lambda each: each.predicted_hit_rate)
    hits.yaxis.set_major_formatter(PercentFormatter(1))
    return figure


def _base(point: Point) -> str:
    return f"{point.scaling}, {point.configuration.partition('; simulated')[0]}"


def _say(axes: Axes, title: str, text: str) -> None:
    axes.set_title(title, loc="left", fontsize="medium")
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
    axes.set_axis_off()


def _draw_key(axes: Axes, colours: Mapping[str, str]) -> None:
    """Name the configurations by their colours, and by the numbers that stand below bars."""
    axes.set_axis_off()
    axes.set_title("Configurations", loc="left", fontsize="medium")
    for number, (name, colour) in enumerate(colours.items(), 1):
        axes.plot([], [], "o-", color=colour, label=f"{number}: {name}")
    axes.legend(loc="upper left", fontsize=8, frameon=False)


def _draw_speed(axes: Axes, points: Sequence[Point], colours: Mapping[str, str], scaling: Scaling) -> None:
    points, title = [each for each in points if each.scaling == scaling], f"{scaling.capitalize()} scaling"
    title = f"{title} ({HELD[scaling]}): samples/s of all ranks"
    if not points:
        return _say(axes, title, "no runs")
    axes.set_title(title, loc="left", fontsize="medium")
    for name in dict.fromkeys(map(_base, points)):
        own = [each for each in points if _base(each) == name]
        style: dict[str, Any] = {"color": colours[name]}
        measured = [each for each in own if each.source == "measured"]
        ranks, speeds = [each.ranks for each in measured], [each.samples_per_second for each in measured]
        bars = [[speed - max(low, speed / 9) for speed, low in zip(speeds, _ends(measured, "low"), strict=True)]]
        bars += [[high - speed for speed, high in zip(speeds, _ends(measured, "high"), strict=True)]]
        axes.errorbar(ranks, speeds, bars, fmt="o-", capsize=3, **style)
        axes.plot(ranks, [each.ideal_per_second for each in measured], linewidth=0.7, linestyle=":", **style)
        planned = [(each.ranks, speed) for each in measured if (speed := each.predicted_per_second) is not None]
        axes.plot([each for each, _ in planned], [speed for _, speed in planned], "x", **style)
        simulated = [each for each in own if each.source == "simulated"]
        ranks = [each.ranks for each in simulated]
        axes.plot(ranks, [each.samples_per_second for each in simulated], "--", **style)
        axes.fill_between(ranks, _ends(simulated, "low"), _ends(simulated, "high"), alpha=0.12, linewidth=0, **style)
    axes.set(yscale="log", xlabel=f"{_RANKS}; dotted: ideal")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
    low, high = axes.get_ylim()
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}" if high < 10 * low else ""))
    _finish(axes, points)
    return None


def _ends(points: Sequence[Point], end: str) -> list[float]:
    """Return an end of each point's interval; of a point without one its speed."""
    return [each.samples_per_second if getattr(each, end) is None else getattr(each, end) for each in points]


def _draw_share(axes: Axes, points: Sequence[Point], colours: Mapping[str, str]) -> None:
    for name, colour in colours.items():
        own = [each for each in points if _base(each) == name]
        measured = [each for each in own if each.source == "measured"]
        shares = [each.efficiency for each in measured]
        halves = [0.0 if each.efficiency_high is None else each.efficiency_high - each.efficiency for each in measured]
        bars = [[min(half, share) for half, share in zip(halves, shares, strict=True)], halves]
        axes.errorbar([each.ranks for each in measured], shares, bars, fmt="o-", capsize=3, color=colour)
        planned = [(each.ranks, share) for each in measured if (share := each.predicted_efficiency) is not None]
        axes.plot([ranks for ranks, _ in planned], [share for _, share in planned], "x", color=colour)
        simulated = [each for each in own if each.source == "simulated"]
        axes.plot([each.ranks for each in simulated], [each.efficiency for each in simulated], "--", color=colour)
    axes.axhline(1, color="grey", linewidth=0.7, linestyle=":")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_title("Efficiency: samples/s of a rank, of those on the fewest", loc="left", fontsize="medium")
    axes.set(xlabel=_RANKS, ylim=(0, None))
    _finish(axes, points)


def _draw_sent(axes: Axes, points: Sequence[Point], names: Sequence[str]) -> None:
    """Draw two bars for each point: measured on the left, planned on the right, hatched."""
    _draw_bars(
        axes,
        [
            (at + shift, {kind: of.get(kind, 0.0) / 2**10 for kind in _KINDS}, hatch)
            for at, point in enumerate(points)
            for shift, of, hatch in ((-0.2, point.sent_bytes, ""), (0.2, point.predicted_sent_bytes, "//"))
        ],
        width=0.38,
    )
    _label_bars(axes, points, names)
    axes.set_title("Sent by a rank in a step of training, KiB; hatched: planned", loc="left", fontsize="medium")


def _draw_parts(axes: Axes, points: Sequence[Point], names: Sequence[str], field: str, title: str, none: str) -> None:
    own = [each for each in points if getattr(each, field)]
    if not own:
        return _say(axes, title, none)
    _draw_bars(axes, [(at, getattr(point, field), "") for at, point in enumerate(own)], width=0.8)
    steps = [each.step_ms if each.source == "measured" else each.predicted_step_ms for each in own]
    known = [(at, step) for at, step in enumerate(steps) if step is not None]
    marks: dict[str, Any] = {"marker": "_", "markersize": 14, "linestyle": "", "color": "black"}
    axes.plot(
        [at for at, _ in known],
        [step for _, step in known],
        label="measured step" if own[0].source == "measured" else "step",
        **marks,
    )
    _label_bars(axes, own, names)
    axes.set_title(title, loc="left", fontsize="medium")
    return None


def _draw_bars(axes: Axes, bars: Sequence[tuple[float, Mapping[str, float], str]], width: float) -> None:
    """Draw stacked bars, each with its place, its parts and its hatch; a part has one colour in all."""
    parts = dict.fromkeys(name for _, of, _ in bars for name, value in of.items() if value)
    bottoms = [0.0] * len(bars)
    axes.use_sticky_edges = False  # or the highest bar touches the frame
    for part in parts:
        for hatch in ("", "//"):
            own = [at for at, bar in enumerate(bars) if bar[2] == hatch]
            heights = [bars[at][1].get(part, 0.0) for at in own]
            label = part.replace("_", " ") if not hatch else None
            style: dict[str, Any] = {"color": _colour(part), "hatch": hatch or None, "alpha": 0.6 if hatch else 1}
            axes.bar([bars[at][0] for at in own], heights, width, [bottoms[at] for at in own], label=label, **style)
            for at, height in zip(own, heights, strict=True):
                bottoms[at] += height


def _colour(part: str) -> Any:
    """Return the colour of a part, the same in all panels."""
    known = [*_KINDS, *PARTS, STRAGGLERS, *get_args(Stage)]
    colours = [colormaps[name](number) for name in ("tab20", "tab20b") for number in range(20)]
    return colours[known.index(part)] if part in known else "silver"


def _label_bars(axes: Axes, points: Sequence[Point], names: Sequence[str]) -> None:
    labels = [f"{each.ranks}\n{names.index(_base(each)) + 1}" for each in points]
    every = -(-len(labels) // 26)
    axes.set_xticks(range(0, len(points), every), labels[::every], fontsize=7)
    axes.set(xlabel="ranks; below: number of the configuration", ylim=(0, None))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=6, ncols=2, framealpha=0.6)


def _draw_memory(device: Axes, process: Axes, points: Sequence[Point], colours: Mapping[str, str]) -> None:
    has_gpu = any(each.peak_device_bytes is not None for each in points)
    title = "Device memory of the fullest rank, MiB" if has_gpu else "Caches of the fullest rank, MiB"

    def on_device(each: Point) -> float | None:
        return _mebibytes(each.peak_device_bytes if has_gpu else each.cache_bytes)

    def planned(each: Point) -> float | None:
        return _mebibytes(each.predicted_device_bytes if has_gpu else each.predicted_cache_bytes)

    _draw_lines(device, points, colours, on_device, title, planned)
    title, peak = "Memory of a rank's process, the most, MiB", lambda each: _mebibytes(each.peak_process_bytes)
    _draw_lines(process, points, colours, peak, title, lambda each: _mebibytes(each.predicted_process_bytes))


def _mebibytes(count: int | None) -> float | None:
    return None if count is None else count / 2**20


def _draw_lines(
    axes: Axes,
    points: Sequence[Point],
    colours: Mapping[str, str],
    value: _Value,
    title: str,
    planned: _Value = lambda _: None,
) -> None:
    if all(value(each) is None and planned(each) is None for each in points):
        return _say(axes, title, "not measured")
    for name, colour in colours.items():
        own = [each for each in points if _base(each) == name]
        for of, form in ((value, "o-"), (planned, "x")):
            pairs = [(each.ranks, found) for each in own if (found := of(each)) is not None]
            axes.plot([ranks for ranks, _ in pairs], [found for _, found in pairs], form, color=colour)
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set(xlabel=_RANKS)
    _finish(axes, points)
    return None


def _finish(axes: Axes, points: Sequence[Point]) -> None:
    ranks = sorted({each.ranks for each in points})
    axes.set(xscale="log")
    shown = ranks[:: -(-len(ranks) // _MOST_LABELS)]
    axes.set_xticks(shown, [f"{each:,}" for each in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(True, linewidth=0.3)
