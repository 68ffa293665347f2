"""A plan, the comparison of several plans, and simulated scaling as pictures."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from embershard.extras.what_if.cases import ComparedCase
from embershard.extras.what_if.simulate_scaling import SimulatedRun
from embershard.planning.cost.topology import Topology
from embershard.planning.uncertainty import PlannedCase
from embershard.sharding.plan import Prediction, RankPrediction
from embershard.units import size

_MOST_RANKS = 16
_TITLE_WIDTH = 165  # characters of a line
#: A logarithmic axis has at least so many labels, if its range has so many round numbers.
_LEAST_TICKS = 4


def what_if_figure(outcomes: Sequence[ComparedCase], topology: Topology) -> Figure:
    """Draw the samples per second of every case, with the ideal ones, and the fullest rank's device memory.

    Args:
        topology: the machine.
    """
    drawn = [(outcome, outcome.prediction) for outcome in outcomes if outcome.prediction is not None]
    title = f"Estimate: plans for {topology.name}. Nothing here was measured."
    figure, speed, memory = _two_panels(title, topology, [prediction.bottleneck for _, prediction in drawn])
    _draw_cases(speed, drawn)
    varied = _varied(outcome for outcome, _ in drawn)
    names = ["\n".join([str(outcome.num_ranks), *(varied[name](outcome) for name in varied)]) for outcome, _ in drawn]
    fullest = [max(prediction.ranks, key=lambda rank: rank.total_device_bytes) for _, prediction in drawn]
    _draw_memory(memory, names, fullest, {o.plan.device_memory_bytes for o, _ in drawn if o.plan is not None})
    memory.set(xlabel=f"ranks; below: {', '.join(varied)}" if varied else "ranks")
    memory.set_title("Device memory of the fullest rank, predicted, by use", loc="left", fontsize="medium")
    return figure


def plan_figure(case: PlannedCase, topology: Topology) -> Figure:
    """Draw where each rank's step time and device memory go, of the slowest ranks where there are many."""
    prediction = case.prediction
    assert case.plan is not None, "it was made"
    assert prediction is not None, "a new plan has one"
    title = (
        f"Estimate: a plan of {case.name} for {topology.name}: {prediction.samples_per_second:,.0f} samples/s, a step "
        f"of {1e3 * prediction.step_seconds:.2f} ms waits for {_words(prediction.bottleneck)}. Nothing here was "
        "measured."
    )
    figure, times, memory = _two_panels(title, topology, [prediction.bottleneck])
    slowest = sorted(prediction.ranks, key=lambda rank: -rank.step_seconds)[:_MOST_RANKS]
    ranks = sorted(slowest, key=lambda rank: rank.rank)
    names = [str(rank.rank) for rank in ranks]
    _stack(times, names, {part: [1e3 * rank.seconds[part] for rank in ranks] for part in ranks[0].seconds})
    times.set(xlabel="rank", ylabel="ms of a step")
    times.set_title("Work of a step by part; parts may run beside each other", loc="left", fontsize="medium")
    _draw_memory(memory, names, ranks, {case.plan.memory_bytes_of(rank.rank) for rank in ranks})
    memory.set(xlabel="rank")
    memory.set_title("Device memory, predicted, by use", loc="left", fontsize="medium")
    return figure


def simulation_figure(runs: Sequence[SimulatedRun], topology: Topology) -> Figure:
    """Draw simulated samples per second over the ranks, and what a step's time goes to."""
    fitting = [run for run in runs if run.parts is not None]
    title = f"Estimate: simulated training on {topology.name}. Nothing here was measured."
    longest = [max(run.parts or {"": 0.0}, key=(run.parts or {"": 0.0}).__getitem__) for run in fitting]
    figure, speed, shares = _two_panels(title, topology, longest)
    ranks = [run.num_ranks for run in fitting]
    _draw_line(speed, ranks, [run.samples_per_second for run in fitting], "simulated", with_ideal=True)
    _finish_speed(speed, ranks)
    speed.set_title("Speed", loc="left", fontsize="medium")
    parts = dict.fromkeys(part for run in fitting for part in run.parts or ())
    heights = {part: [(run.parts or {}).get(part, 0.0) / run.step_seconds for run in fitting] for part in parts}
    _stack(shares, [str(each) for each in ranks], heights, totals=False)
    shares.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
    shares.set_yticks([0, 0.25, 0.5, 0.75, 1])
    shares.set(xlabel="ranks", ylabel="share of a step's time")
    shares.set_title("Where a step's time goes, mean of the ranks", loc="left", fontsize="medium")
    return figure


_Drawn = Sequence[tuple[ComparedCase, Prediction]]
#: What cases may differ in, beside their ranks, and a case's own in words.
_NAMED: Mapping[str, Callable[[ComparedCase], str]] = {
    "machine": lambda case: case.machine,
    "batch": lambda case: str(case.batch or ""),
    "share of the rows on the device": lambda case: "" if case.ratio is None else f"{case.ratio:g}",
}
#: What a picture may be drawn over, and a case's place there.
_AXES: Mapping[str, Callable[[ComparedCase], float]] = {
    "ranks": lambda case: case.num_ranks,
    "share of the rows on the device": lambda case: case.ratio or 0.0,
    "samples of a rank": lambda case: 0 if case.batch is None else case.batch.of_rank(case.num_ranks),
}


def _varied(cases: Iterable[ComparedCase]) -> dict[str, Callable[[ComparedCase], str]]:
    """Return what differs among cases."""
    cases = list(cases)
    return {name: tell for name, tell in _NAMED.items() if len({tell(each) for each in cases}) > 1}


def _two_panels(title: str, topology: Topology, limits: Iterable[str]) -> tuple[Figure, Axes, Axes]:
    """Begin a picture, whose title has the errors of predictions that these parts of a step limit."""
    notes = dict.fromkeys(topology.error_note(limit) for limit in dict.fromkeys(limits))
    lines = [line for note in notes for line in textwrap.wrap(note, _TITLE_WIDTH)]
    figure = Figure(figsize=(13, 5.4 + 0.2 * len(lines)), layout="constrained")
    figure.suptitle("\n".join([title, *lines]), ha="left", x=0.01, fontsize="small" if lines else "large")
    left, right = figure.subplots(1, 2)
    return figure, left, right


def _words(name: str) -> str:
    return name.replace("_", " ")


def _draw_cases(axes: Axes, cases: _Drawn) -> None:
    """Draw one line per machine, batch and ratio over the number of ranks; with one number of ranks, over the ratios,
    else over the batches."""
    of_cases = [case for case, _ in cases]
    places = {name: {place(case) for case in of_cases} for name, place in _AXES.items()}
    over = next((name for name, values in places.items() if len(values) > 1), "ranks")
    limits = {_words(prediction.bottleneck) for _, prediction in cases}
    told = {name: tell for name, tell in _varied(of_cases).items() if name != over}
    if over == "samples of a rank":
        told.pop("batch", None)
    lines: dict[tuple[str, ...], list[tuple[float, Prediction]]] = {}
    for case, prediction in cases:
        own = tuple(f"{tell(case)} of the rows on the device" if name in _AXES else tell(case)
                    for name, tell in told.items())  # fmt: skip
        lines.setdefault(own, []).append((_AXES[over](case), prediction))
    is_over_ranks = over == "ranks"
    for number, (label, line) in enumerate(lines.items()):
        line.sort(key=lambda point: point[0])
        points = [(x, prediction.samples_per_second) for x, prediction in line]
        width = 1.5 + 2.0 * max(0, min(3, len(lines) - 1 - number))  # what a later line covers can be seen beside it
        x, y = zip(*points, strict=True)
        _draw_line(axes, x, y, ", ".join(label) or "predicted", with_ideal=is_over_ranks, width=width)
        for place, (_, prediction) in zip(points, line, strict=True):
            if len(limits) > 1:
                text = _words(prediction.bottleneck)
                axes.annotate(text, place, fontsize=7, xytext=(4, -10), textcoords="offset points")
    _finish_speed(axes, sorted(places[over]), over)
    limit = f"a step waits for {min(limits)}" if len(limits) == 1 else "at each point what a step waits for"
    axes.set_title(f"Speed; {limit}", loc="left", fontsize="medium")


def _draw_line(
    axes: Axes, x: Sequence[float], y: Sequence[float], label: str, *, with_ideal: bool, width: float = 1.5
) -> None:
    (drawn,) = axes.plot(x, y, marker="o", markersize=4 + width, linewidth=width, label=label)
    if with_ideal and x:
        ideal = [y[0] * each / x[0] for each in x]
        is_first = len(axes.get_lines()) == 1
        label = f"ideal: as fast per rank as on {x[0]:g}" if is_first else ""
        axes.plot(x, ideal, linestyle="--", linewidth=1, color=drawn.get_color(), label=label)


def _finish_speed(axes: Axes, x: Sequence[float], over: str = "ranks") -> None:
    """Give the axes of speeds over ranks, or over something else, their scales, labels and legend."""
    axes.set(xscale="log", xlabel=f"{over} (logarithmic)", ylabel="samples per second, all ranks")
    axes.set_xticks(x, [f"{each:g}" for each in x])
    if over == "ranks":
        axes.set(yscale="log", ylabel="samples per second, all ranks (logarithmic)")
        axes.margins(y=0.1)
        axes.yaxis.set_major_locator(_log_ticks(*axes.get_ylim()))
    else:
        axes.set(ylim=(0, 1.15 * axes.dataLim.y1))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
    axes.margins(x=0.12)
    axes.grid(True, linewidth=0.3)
    axes.legend(fontsize=8, loc="best")


def _log_ticks(low: float, high: float) -> FixedLocator:
    """Return round numbers between two, as few as are enough to read an axis by."""
    ticks: list[float] = []
    for subs in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8), [each / 10 for each in range(10, 100, 2)]):
        ticks = [each for each in LogLocator(subs=subs, numticks=99).tick_values(low, high) if low <= each <= high]
        if len(ticks) >= _LEAST_TICKS:
            break
    return FixedLocator(ticks)


def _stack(
    axes: Axes, names: Sequence[str], parts: Mapping[str, Sequence[float]], *, totals: bool = True, top: float = 0.0
) -> None:
    """Draw a bar for each name, in parts; with its total above it, and room for the legend."""
    bottom = [0.0] * len(names)
    for part, heights in parts.items():
        if any(heights):
            bars = axes.bar(names, heights, bottom=bottom, label=_words(part))
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    if totals and any(bottom):
        axes.bar_label(bars, [f"{total:,.4g}" for total in bottom], fontsize=7, padding=2)
    axes.set(ylim=(0, top or 1.35 * max(bottom, default=1.0) or 1.0))
    axes.legend(fontsize=8, ncols=3, loc="upper center")


def _draw_memory(axes: Axes, names: Sequence[str], ranks: Sequence[RankPrediction], budgets: set[int | None]) -> None:
    """Draw a bar of device memory for each of the ranks, with a part for each use of the bytes, and the budgets."""
    most = max((rank.total_device_bytes for rank in ranks), default=1)
    unit, unit_bytes = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
    kinds = dict.fromkeys(kind for rank in ranks for kind in rank.device_bytes)  # without caches there are fewer
    top = 1.35 * most / unit_bytes
    for budget in budgets - {None}:
        assert budget is not None, "left out"
        above = ", above the picture" if budget / unit_bytes > top else ""
        label = f"budget: {size(budget)}{above}"
        axes.axhline(budget / unit_bytes, color="black", linewidth=0.8, linestyle=":", label=label)
    _stack(
        axes, names, {kind: [rank.device_bytes.get(kind, 0) / unit_bytes for rank in ranks] for kind in kinds}, top=top
    )
    axes.set(ylabel=f"device memory of a rank, {unit}")
