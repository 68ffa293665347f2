"""Several plans compared on the screen: what each number of ranks reaches, how surely, and for how much money."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from embershard.commands.plan.view import HITS, HITS_LEGEND, count, hits_cells, interval
from embershard.extras.what_if.cases import cheapest, efficiency
from embershard.launch.screen import make_table, say
from embershard.planning.uncertainty import PlannedCase
from embershard.units import size

_LEGEND = (
    "efficiency: samples/s per rank, over that of the fewest ranks. caches, device: memory of the fullest rank, "
    "its caches (slots and maps), and all of it (dense layers, activations, buffers, a reserve)."
)


def try_all(
    cases: Sequence[tuple[int, float | None]], make: Callable[[int, float | None], PlannedCase], console: Console
) -> list[PlannedCase]:
    """Make a plan for every case: a number of ranks, and a share of the rows on the device."""
    tell = Teller(make, console, len(cases))
    return [tell(num_ranks, ratio) for num_ranks, ratio in cases]


class Teller:
    """Makes plans, and tells each when it is done: the next one may take long."""

    def __init__(
        self, make: Callable[[int, float | None], PlannedCase], console: Console, num_cases: int | None = None
    ) -> None:
        self._make, self._console, self._num_cases, self._done = make, console, num_cases, 0

    def __call__(self, num_ranks: int, ratio: float | None = None) -> PlannedCase:
        """Plan a case."""
        self._done += 1
        place = f"{self._done}" if self._num_cases is None else f"{self._done} of {self._num_cases}"
        what = f"{num_ranks} ranks" + ("" if ratio is None else f", {ratio:g} of the rows on the device")
        with self._console.status(f"{place}: {what}"):
            case = self._make(num_ranks, ratio)
        self._console.print(f"Planned {place}: {case.sentence}", soft_wrap=True)
        self._console.file.flush()
        return case


def show_what_if(outcomes: Sequence[PlannedCase], console: Console) -> None:
    """Print speed and memory of every case, and what there is to know."""
    for table in (_speed_table(outcomes), _memory_table(outcomes)):
        console.print(table)
    planned = [each for each in outcomes if each.plan is not None]
    notes: dict[str, list[PlannedCase]] = {}  # with the cases that they are of
    for outcome in planned:
        for note in () if outcome.plan is None else outcome.plan.notes:
            notes.setdefault(note, []).append(outcome)
    problems = [f"{each.name}: {each.problem}" for each in outcomes if each.problem]
    intervals = {interval(each.certainty): None for each in planned if each.certainty is not None}
    lines = [f"Note{_of_which(of, planned)}: {note}" for note, of in notes.items()]
    say(console, _LEGEND, HITS_LEGEND, *intervals, *problems, *lines)


def _of_which(cases: Sequence[PlannedCase], planned: Sequence[PlannedCase]) -> str:
    """Return which of the planned cases these are: " on 2 ranks"; nothing if all."""
    if len(cases) == len(planned):
        return ""
    machines = {each.machine for each in cases}
    if len(cases) == sum(each.machine in machines for each in planned):
        return f" on {'; '.join(dict.fromkeys(each.machine for each in cases))}"
    return f" on {'; '.join(each.name for each in cases)}"


def _speed_table(outcomes: Sequence[PlannedCase]) -> Table:
    money = ("for 1 of\nthe price",) if outcomes[0].price is not None else ()
    speed = ("samples/s", "per rank", *money, "efficiency", "step ms", "from", "to", "waits for")
    table = _table("What if: speed", outcomes, speed)
    for outcome in outcomes:
        prediction, share, certainty = outcome.prediction, efficiency(outcome, outcomes), outcome.certainty
        if prediction is None:
            table.add_row(*_cells(outcome), "does not fit")
            continue
        ends = () if certainty is None else (certainty.low_seconds, certainty.high_seconds)
        per_money = outcome.samples_per_money
        table.add_row(
            *_cells(outcome),
            f"{outcome.samples_per_second:,.0f}",
            f"{outcome.samples_per_second / outcome.num_ranks:,.0f}",
            *(() if per_money is None else (count(per_money),)),
            "" if share is None else f"{share:.0%}",
            f"{prediction.step_seconds * 1e3:.2f}",
            *(f"{seconds * 1e3:.2f}" for seconds in ends),
            prediction.bottleneck,
        )
    return table


def _memory_table(outcomes: Sequence[PlannedCase]) -> Table:
    memory = ("caches/rank", "device/rank", "host/node", "fills/step")
    table = _table("What if: hits and memory", outcomes, (*HITS, *memory))
    for outcome in outcomes:
        plan, prediction = outcome.plan, outcome.prediction
        if plan is None or prediction is None:
            continue
        table.add_row(
            *_cells(outcome),
            *hits_cells(prediction.tables),
            size(max(rank.cache_device_bytes for rank in prediction.ranks)),
            size(prediction.most_device_bytes),
            size(prediction.most_host_bytes(plan.ranks_per_node)),
            f"{sum(table.fills for table in prediction.tables):,.0f}",
        )
    return table


def _table(title: str, outcomes: Sequence[PlannedCase], right: Sequence[str]) -> Table:
    return make_table(title, ("machine",) if outcomes[0].machine else (), ("ranks", "ratio", *right))


def _cells(outcome: PlannedCase) -> list[str]:
    """Return the cells that name a case."""
    ratio = "" if outcome.ratio is None else f"{outcome.ratio:g}"
    return [*([outcome.machine] if outcome.machine else []), str(outcome.num_ranks), ratio]


def show_target(outcomes: Sequence[PlannedCase], target: float, console: Console) -> PlannedCase | None:
    """Print the cheapest case that reaches so many samples per second, as predicted, and for sure; return the first."""
    found, surely = cheapest(outcomes, target), cheapest(outcomes, target, surely=True)
    wanted = f"{target:,.0f} samples/s"
    if found is None:
        best = max(outcomes, key=lambda each: each.samples_per_second)
        fits = f"The fastest is {best.sentence}" if best.plan is not None else "None of them fits"
        say(console, f"None of these reaches {wanted}. {fits}.")
        return None
    lines = [f"{wanted} take {_machines(found)}."]
    if surely is None:
        lines.append("At the slow end of its interval, none of these reaches it.")
    elif surely is not found:
        lines.append(f"At the slow end of its interval, too: {_machines(surely)}.")
    else:
        lines.append("So they do at the slow end of their interval.")
    say(console, " ".join(lines))
    return found


def _machines(case: PlannedCase) -> str:
    """Return the machines of a case, what they cost, and what they reach."""
    assert case.plan is not None, "it reaches a target"
    per_node = case.plan.ranks_per_node
    nodes, low = case.num_ranks // per_node, case.range_per_second[0]
    shape = f"{nodes} nodes of {per_node}, " if nodes > 1 else ""
    cost = "" if case.price is None else f"{case.cost_per_hour:,.2f} an hour, "
    return f"{case.name} ({shape}{cost}{case.samples_per_second:,.0f} samples/s, at least {low:,.0f})"
