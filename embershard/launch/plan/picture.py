"""The comparison of several plans as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embershard.launch.plan.what_if import Outcome
from embershard.sharding.plan import RankPrediction


def draw_what_if(outcomes: Sequence[Outcome], path: Path) -> None:
    """Samples per second of every case (dashed: perfect scaling), and what the fullest rank's device memory is for."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    speed, memory = figure.subplots(1, 2)
    drawn = [outcome for outcome in outcomes if outcome.plan is not None]
    if len({outcome.num_ranks for outcome in drawn}) > 1:
        _draw_by_ranks(speed, drawn)
    else:
        _draw_by_ratio(speed, drawn)
    _draw_memory(memory, drawn)
    figure.savefig(path, dpi=150)


def _draw_by_ranks(axes: Any, outcomes: Sequence[Outcome]) -> None:
    for ratio in dict.fromkeys(outcome.ratio for outcome in outcomes):
        line = [outcome for outcome in outcomes if outcome.ratio == ratio]
        x, y = [outcome.num_ranks for outcome in line], [outcome.samples_per_second or 0.0 for outcome in line]
        label = "predicted" if ratio is None else f"predicted, {ratio:g} of the rows on the device"
        (drawn,) = axes.plot(x, y, marker="o", label=label)
        ideal = [y[0] * ranks / x[0] for ranks in x]
        axes.plot(x, ideal, linestyle="--", linewidth=0.8, color=drawn.get_color())
        _name_bottlenecks(axes, x, y, line)
    ticks = sorted({outcome.num_ranks for outcome in outcomes})
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="samples per second")
    axes.set_xticks(ticks, [str(ranks) for ranks in ticks])
    _finish(axes)


def _draw_by_ratio(axes: Any, outcomes: Sequence[Outcome]) -> None:
    x = [outcome.ratio or 0.0 for outcome in outcomes]
    y = [outcome.samples_per_second or 0.0 for outcome in outcomes]
    axes.plot(x, y, marker="o", label="predicted")
    _name_bottlenecks(axes, x, y, outcomes)
    axes.set(xscale="log", ylim=(0, 1.15 * max(y, default=1.0)), ylabel="samples per second")
    axes.set(xlabel="share of the rows on the device")
    axes.set_xticks(x, [f"{ratio:g}" for ratio in x])
    _finish(axes)


def _name_bottlenecks(axes: Any, x: Sequence[float], y: Sequence[float], outcomes: Sequence[Outcome]) -> None:
    for place, outcome in zip(zip(x, y, strict=True), outcomes, strict=True):
        text = outcome.bottleneck.replace("_", " ")
        axes.annotate(text, place, fontsize=7, xytext=(4, -10), textcoords="offset points")


def _finish(axes: Any) -> None:
    axes.minorticks_off()
    axes.margins(x=0.12)
    axes.grid(True, linewidth=0.3)
    axes.legend(fontsize=8)


def _draw_memory(axes: Any, outcomes: Sequence[Outcome]) -> None:
    """A bar per case, by what the bytes are for."""
    ranks = [_fullest(outcome) for outcome in outcomes]
    names = [f"{o.num_ranks}" + ("" if o.ratio is None else f"\n{o.ratio:g}") for o in outcomes]
    bottom = [0.0] * len(ranks)
    for kind in ranks[0].device_bytes if ranks else ():
        heights = [rank.device_bytes[kind] / 1e9 for rank in ranks]
        if any(heights):
            axes.bar(names, heights, bottom=bottom, label=kind.replace("_", " "))
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    budgets = {outcome.plan.device_memory_bytes for outcome in outcomes if outcome.plan is not None}
    for budget in budgets - {None}:
        axes.axhline((budget or 0) / 1e9, color="black", linewidth=0.8, linestyle=":", label="budget")
    with_ratio = any(outcome.ratio is not None for outcome in outcomes)
    axes.set(xlabel="ranks, and share of the rows" if with_ratio else "ranks")
    axes.set(ylabel="GB of device memory, fullest rank", ylim=(0, 1.25 * max(bottom, default=1.0)))
    axes.legend(fontsize=8, ncols=3)


def _fullest(outcome: Outcome) -> RankPrediction:
    assert outcome.plan is not None, "only plans are drawn"
    assert outcome.plan.prediction is not None, "a new plan has a prediction"
    return max(outcome.plan.prediction.ranks, key=lambda rank: sum(rank.device_bytes.values()))
