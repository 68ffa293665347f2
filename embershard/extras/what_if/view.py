"""Several plans compared on the screen: what each number of ranks reaches, how surely, and for how much money."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from embershard.commands.plan.run import Setup
from embershard.commands.plan.view import HITS, HITS_LEGEND, count, hits_cells, interval
from embershard.extras.what_if.cases import ComparedCase, cheapest, efficiency
from embershard.extras.what_if.grid import UnplannedCase
from embershard.launch.arguments import set_words
from embershard.launch.screen import make_table, say
from embershard.units import size

_LEGEND = (
    "efficiency: samples/s per rank, over that of the fewest ranks. caches, device: memory of the fullest rank, "
    "its caches (slots and maps), and all of it (dense layers, activations, buffers, a reserve)."
)
_SCALING = (
    "scaling: weak, where a rank has as many samples on any number of ranks; strong, where all ranks together have. "
    "Efficiency is that among cases with the same samples each, or together."
)


class Teller:
    """Makes plans, and tells each when it is done: the next one may take long."""

    def __init__(self, console: Console, num_cases: int | None) -> None:
        self._console, self._done = console, 0
        self._of_all = "" if num_cases is None else f" of {num_cases}"

    def __call__(self, case: UnplannedCase) -> ComparedCase:
        """Plan a case."""
        self._done += 1
        place = f"{self._done}{self._of_all}"
        with self._console.status(f"{place}: {case.without_plan.name}"):
            planned = case.planned()
        self._console.print(f"Planned {place}: {planned.sentence}", soft_wrap=True)
        self._console.file.flush()
        return planned


def show_what_if(outcomes: Sequence[ComparedCase], console: Console) -> None:
    """Print speed and memory of every case, and what there is to know."""
    for table in (_speed_table(outcomes), _memory_table(outcomes)):
        console.print(table)
    planned = [each for each in outcomes if each.plan is not None]
    notes: dict[str, list[ComparedCase]] = {}  # with the cases that they are of
    for outcome in planned:
        for note in () if outcome.plan is None else outcome.plan.notes:
            notes.setdefault(note, []).append(outcome)
    problems = [f"{each.name}: {each.problem}" for each in outcomes if each.problem]
    intervals = {interval(each.certainty): None for each in planned if each.certainty is not None}
    lines = [f"Note{_of_which(of, planned)}: {note}" for note, of in notes.items()]
    legends = (_LEGEND, *([_SCALING] if outcomes[0].batch is not None else ()), HITS_LEGEND)
    say(console, *legends, *intervals, *problems, *lines)


def show_left_out(num_planned: int, left_out: Mapping[str, int], console: Console) -> None:
    """Print how many cases were not planned, and why."""
    reasons = [f"{count:,} {reason}" for reason, count in left_out.items() if count]
    if reasons:
        everything = num_planned + sum(left_out.values())
        say(console, f"Of {everything:,} cases {num_planned:,} were planned. Not planned: {'; '.join(reasons)}.")


def _of_which(cases: Sequence[ComparedCase], planned: Sequence[ComparedCase]) -> str:
    """Return which of the planned cases these are: " on 2 ranks"; nothing if all."""
    if len(cases) == len(planned):
        return ""
    machines = {each.machine for each in cases}
    if len(cases) == sum(each.machine in machines for each in planned):
        return f" on {'; '.join(dict.fromkeys(each.machine for each in cases))}"
    return f" on {'; '.join(each.name for each in cases)}"


def _speed_table(outcomes: Sequence[ComparedCase]) -> Table:
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


def _memory_table(outcomes: Sequence[ComparedCase]) -> Table:
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


def _table(title: str, outcomes: Sequence[ComparedCase], right: Sequence[str]) -> Table:
    first = outcomes[0]
    batch = () if first.batch is None else ("samples\nof a rank", "of a step")
    left = (*(("machine",) if first.machine else ()), *(() if first.batch is None else ("scaling",)))
    return make_table(title, left, ("ranks", *batch, "ratio", *right))


def _cells(outcome: ComparedCase) -> list[str]:
    """Return the cells that name a case."""
    ratio = "" if outcome.ratio is None else f"{outcome.ratio:g}"
    machine = [outcome.machine] if outcome.machine else []
    ranks, batch = outcome.num_ranks, outcome.batch
    if batch is None:
        return [*machine, str(ranks), ratio]
    return [*machine, batch.scaling, str(ranks), f"{batch.of_rank(ranks):,}", f"{batch.of_all(ranks):,}", ratio]


def show_target(outcomes: Sequence[ComparedCase], target: float, console: Console) -> ComparedCase | None:
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


def show_budget(outcomes: Sequence[ComparedCase], cost_per_hour: float, console: Console) -> ComparedCase | None:
    """Print the fastest of these cases, which cost at most so much; of equal ones the cheapest. Return it."""
    planned = [each for each in outcomes if each.plan is not None]
    if not planned:
        say(console, f"None that costs at most {cost_per_hour:,.2f} an hour fits.")
        return None
    found = max(planned, key=lambda each: (each.samples_per_second, -each.cost_per_hour))
    say(console, f"The fastest for at most {cost_per_hour:,.2f} an hour: {_machines(found)}.")
    return found


def show_training(case: ComparedCase, setup: Setup, console: Console) -> None:
    """Print what to change in the command for a plan of a case, where batches were compared, and its settings."""
    if case.batch is None:
        return
    arguments, config = setup.arguments, setup.config
    source = ["--tables", str(arguments.tables)] if arguments.config is None else ["--config", str(arguments.config)]
    settings = set_words(case.batch.overrides(config.train))
    words = [*source, *settings, "--topology", case.machine or arguments.topology, "--ranks", str(case.num_ranks)]
    words += [] if case.ratio is None else ["--ratios", f"{case.ratio:g}"]
    say(
        console,
        f"Train it with {shlex.join(settings)}. Its plan, beside the other options that you gave:  "
        f"embershard plan {shlex.join(words)} -o plan.json",
    )


def _machines(case: ComparedCase) -> str:
    """Return the machines of a case, what they cost, and what they reach."""
    assert case.plan is not None, "it reaches a target"
    per_node = case.plan.ranks_per_node
    nodes, low = case.num_ranks // per_node, case.range_per_second[0]
    shape = f"{nodes} nodes of {per_node}, " if nodes > 1 else ""
    cost = "" if case.price is None else f"{case.cost_per_hour:,.2f} an hour, "
    return f"{case.name} ({shape}{cost}{case.samples_per_second:,.0f} samples/s, at least {low:,.0f})"
