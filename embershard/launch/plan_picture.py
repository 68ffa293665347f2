"""The comparison of several plans as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from embershard.launch.what_if import Outcome


def draw_what_if(outcomes: Sequence[Outcome], path: Path) -> None:
    """Samples per second against ranks (dashed: perfect scaling), and device memory per rank; a line per ratio."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    speed, memory = figure.subplots(1, 2)
    ratios = list(dict.fromkeys(outcome.ratio for outcome in outcomes))
    several_ranks = len({outcome.num_ranks for outcome in outcomes}) > 1
    for ratio in ratios if several_ranks else [None]:
        line = [o for o in outcomes if o.plan is not None and (not several_ranks or o.ratio == ratio)]
        if not line:
            continue
        x = [o.num_ranks if several_ranks else (o.ratio or 0.0) for o in line]
        y = [o.samples_per_second or 0.0 for o in line]
        label = "plan" if ratio is None else f"{ratio:g} of the rows"
        (drawn,) = speed.plot(x, y, marker="o", label=label)
        if several_ranks:
            ideal = [y[0] * ranks / x[0] for ranks in x]
            speed.plot(x, ideal, linestyle="--", linewidth=0.8, color=drawn.get_color())
        gigabytes = [_most_gigabytes(o) for o in line]
        memory.plot(x, gigabytes, marker="o", label=label)
        for place, outcome in zip(zip(x, y, strict=True), line, strict=True):
            speed.annotate(outcome.bottleneck, place, fontsize=7, xytext=(3, -9), textcoords="offset points")
    speed.set(ylabel="samples per second, predicted", yscale="log", xscale="log")
    memory.set(ylabel="GB of device memory, fullest rank", xscale="log", ylim=(0, None))
    for axes in (speed, memory):
        axes.set_xlabel("ranks" if several_ranks else "share of the rows on the device")
        axes.grid(True, which="both", linewidth=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def _most_gigabytes(outcome: Outcome) -> float:
    assert outcome.plan is not None, "only plans are drawn"
    assert outcome.plan.prediction is not None, "a new plan has a prediction"
    return max(sum(rank.device_bytes.values()) for rank in outcome.plan.prediction.ranks) / 1e9
