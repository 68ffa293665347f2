"""The comparison of several plans as a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from embershard.errors import naming_file
from embershard.launch.plan.what_if import PlannedCase
from embershard.planning.cost.topology import Topology
from embershard.sharding.plan import Prediction
from embershard.units import size

_TITLE_WIDTH = 165  # characters of a line


def draw_what_if(outcomes: Sequence[PlannedCase], topology: Topology, path: Path) -> None:
    """Write the picture of `make_figure`."""
    with naming_file(path):
        make_figure(outcomes, topology).savefig(path, dpi=130)


def make_figure(outcomes: Sequence[PlannedCase], topology: Topology) -> Figure:
    """Draw the samples per second of every case, with the ideal ones, and the fullest rank's device memory.

    Args:
        topology: the machine.
    """
    drawn = [(outcome, outcome.prediction) for outcome in outcomes if outcome.prediction is not None]
    limits = dict.fromkeys(prediction.bottleneck for _, prediction in drawn)
    errors = [line for limit in limits for line in textwrap.wrap(topology.error_note(limit), _TITLE_WIDTH)]
    figure = Figure(figsize=(13, 5.4 + 0.2 * len(errors)), layout="constrained")
    title = f"Estimate: plans for {topology.name}. Nothing here was measured."
    figure.suptitle("\n".join([title, *errors]), ha="left", x=0.01, fontsize="small")
    speed, memory = figure.subplots(1, 2)
    _draw_speed(speed, drawn)
    _draw_memory(memory, drawn)
    return figure


_Drawn = Sequence[tuple[PlannedCase, Prediction]]


def _draw_speed(axes: Axes, cases: _Drawn) -> None:
    """Draw one line per ratio over the number of ranks; with one number of ranks, one line over the ratios."""
    ranks = sorted({outcome.num_ranks for outcome, _ in cases})
    if len(ranks) > 1:
        for ratio in dict.fromkeys(outcome.ratio for outcome, _ in cases):
            line = [case for case in cases if case[0].ratio == ratio]
            label = "predicted" if ratio is None else f"predicted, {ratio:g} of the rows on the device"
            x = [outcome.num_ranks for outcome, _ in line]
            drawn = _draw_line(axes, x, line, label)
            ideal = [line[0][1].samples_per_second * each / x[0] for each in x]
            label = f"ideal: as fast per rank as {line[0][0].name}"
            axes.plot(x, ideal, linestyle="--", linewidth=1, color=drawn.get_color(), label=label)
        axes.set(xscale="log", yscale="log", xlabel="ranks")
        axes.set_xticks(ranks, [str(each) for each in ranks])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:
        ratios = [outcome.ratio or 0.0 for outcome, _ in cases]
        _draw_line(axes, ratios, cases, "predicted")
        most = max((prediction.samples_per_second for _, prediction in cases), default=1.0)
        axes.set(xscale="log", ylim=(0, 1.15 * most))
        axes.set(xlabel="share of the rows on the device")
        axes.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
    axes.set(ylabel="samples per second, all ranks")
    axes.set_title("Speed; at each point what a step waits for", loc="left", fontsize="medium")
    axes.margins(x=0.12)
    axes.grid(True, linewidth=0.3)
    axes.legend(fontsize=8, loc="lower right")


def _draw_line(axes: Axes, x: Sequence[float], cases: _Drawn, label: str) -> Line2D:
    """Draw the samples per second, each point with its bottleneck."""
    y = [prediction.samples_per_second for _, prediction in cases]
    (line,) = axes.plot(x, y, marker="o", label=label)
    for place, (_, prediction) in zip(zip(x, y, strict=True), cases, strict=True):
        text = prediction.bottleneck.replace("_", " ")
        axes.annotate(text, place, fontsize=7, xytext=(4, -10), textcoords="offset points")
    return line


def _draw_memory(axes: Axes, cases: _Drawn) -> None:
    """Draw a bar per case, with a part for each use of the bytes."""
    names = [f"{o.num_ranks}" + ("" if o.ratio is None else f"\n{o.ratio:g}") for o, _ in cases]
    ranks = [max(prediction.ranks, key=lambda rank: rank.total_device_bytes) for _, prediction in cases]
    most = max((rank.total_device_bytes for rank in ranks), default=1)
    unit, unit_bytes = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
    bottom = [0.0] * len(ranks)
    for kind in ranks[0].device_bytes if ranks else ():
        heights = [rank.device_bytes[kind] / unit_bytes for rank in ranks]
        if any(heights):
            axes.bar(names, heights, bottom=bottom, label=kind.replace("_", " "))
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    top = 1.35 * most / unit_bytes
    for budget in {outcome.plan.device_memory_bytes for outcome, _ in cases if outcome.plan is not None}:
        if budget is not None:
            above = ", above the picture" if budget / unit_bytes > top else ""
            label = f"budget: {size(budget)}{above}"
            axes.axhline(budget / unit_bytes, color="black", linewidth=0.8, linestyle=":", label=label)
    with_ratio = any(outcome.ratio is not None for outcome, _ in cases)
    axes.set(xlabel="ranks, and share of the rows on the device" if with_ratio else "ranks")
    axes.set(ylabel=f"device memory, {unit}", ylim=(0, top))
    axes.set_title("Device memory of the fullest rank", loc="left", fontsize="medium")
    axes.legend(fontsize=8, ncols=3, loc="upper center")
