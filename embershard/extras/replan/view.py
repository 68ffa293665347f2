"""A replan on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from embershard.commands.plan.view import NOT_TOLD, hits_cells
from embershard.extras.replan.replan import PlanChange, Replan
from embershard.launch.screen import make_table, say
from embershard.sharding.plan import Prediction, TablePlacement
from embershard.sharding.plan_diff import placement_of
from embershard.units import size

_MOST_RANKS = 12
_LEGEND = (
    "bytes that move: weights and optimizer states on another rank than before. a change takes: a stop, a save, a "
    "resume on the new plan, and the fills until the caches are warm; all rows go through the storage then, whichever "
    "move. pays after: steps whose gain is what the change takes."
)


def show(found: Replan, console: Console, top: int) -> None:
    """Print the old plan then and now, what each change gains and takes, which rows move, and the best choice."""
    console.print(_then_and_now(found))
    drifted = _drifted(found, top)
    if drifted.row_count:
        console.print(drifted)
    console.print(_choices(found))
    shown = found.choices[-1] if found.best is None or not found.best.changed else found.best
    if shown.moves.total:
        console.print(_moved(found, shown, top))
        console.print(_between(shown, found.choices.index(shown)))
    say(console, _LEGEND, *_answer(found))
    notes = [*found.old.other_settings(found.request.settings), *found.request.notes]
    if (machine := found.request.topology) is not None:
        notes.append(machine.error_note(shown.prediction.bottleneck))
    say(console, *(f"Note: {note}" for note in notes))


def _then_and_now(found: Replan) -> Table:
    names = ("step ms", "samples/s", "input ms", "hits", "fills/step", "device/rank", "host/node", "waits for")
    table = make_table("The old plan: what it told, and what it would do now", ("",), names)
    for name, prediction in (("told", found.old.prediction), ("now", found.choices[0].prediction)):
        if prediction is None:
            table.add_row(name, *[NOT_TOLD] * len(names))
            continue
        table.add_row(
            name,
            *_speed(prediction),
            f"{max(rank.seconds.get('input', 0.0) for rank in prediction.ranks) * 1e3:.2f}",
            hits_cells(prediction.tables)[0],
            f"{sum(rank.work['fills'] for rank in prediction.ranks):,.0f}",
            size(prediction.most_device_bytes),
            size(prediction.most_host_bytes(found.old.ranks_per_node)),
            prediction.bottleneck,
        )
    table.caption = "input: to read a step's samples, as fast as each profile's own pass read them"
    return table


def _speed(prediction: Prediction) -> tuple[str, str]:
    return f"{prediction.step_seconds * 1e3:.2f}", f"{prediction.samples_per_second:,.0f}"


def _drifted(found: Replan, top: int) -> Table:
    """Return the tables whose lookups and fills changed most; none where the old plan tells none."""
    names = ("lookups/step", "now", "hits", "now", "fills/step", "now")
    table = make_table("Tables that drifted most: then, and now", ("table",), names)
    if found.old.prediction is None:
        return table
    rows: list[tuple[float, list[str]]] = []
    for placed in found.old.tables:
        then, now = (
            [part for part in prediction.tables if part.table == placed.table]
            for prediction in (found.old.prediction, found.choices[0].prediction)
        )
        lookups, fills = ([sum(getattr(part, name) for part in parts) for parts in (then, now)] for name in _COUNTS)
        hits = [hits_cells(parts)[0] for parts in (then, now)]
        drift = abs(lookups[0] - lookups[1]) + abs(fills[0] - fills[1])
        rows.append((drift, [placed.table, *map(_whole, lookups), *hits, *map(_whole, fills)]))
    for drift, cells in sorted(rows, key=lambda row: -row[0])[:top]:
        if drift >= 1:
            table.add_row(*cells)
    return table


_COUNTS = ("lookups", "fills")


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _choices(found: Replan) -> Table:
    steps, last = found.steps or 0, len(found.choices) - 1  # settings of a run have an end
    names = ("tables\nchanged", "step ms", "samples/s", "bytes that\nmove", f"saves in\n{steps:,} steps")
    table = make_table("To stay, and to change", ("row", ""), (*names, "a change\ntakes", "pays after\nsteps"))
    for number, choice in enumerate(found.choices):
        fewer = "fewer moves" if choice.changed else "slots alone"
        pays = NOT_TOLD if choice.pays_after is None else f"{choice.pays_after:,}"
        table.add_row(
            str(number),
            "stay" if number == 0 else "the best plan" if number == last else fewer,
            str(len(choice.changed)),
            *_speed(choice.prediction),
            size(choice.moves.total),
            duration(steps * choice.gain_seconds),
            NOT_TOLD if choice.seconds is None else duration(choice.seconds),
            pays if number else "",
        )
    return table


def _moved(found: Replan, shown: PlanChange, top: int) -> Table:
    title = f"Tables that move most in row {found.choices.index(shown)}"
    table = make_table(title, ("table", "from", "to"), ("bytes that move",))
    old, new = ({each.table: each for each in choice.candidate.tables} for choice in (found.choices[0], shown))
    ordered = sorted(shown.moves.tables, key=lambda name: -shown.moves.tables[name])
    for name in ordered[:top]:
        table.add_row(name, _place(old[name]), _place(new[name]), size(shown.moves.tables[name]))
    if len(ordered) > top:
        table.caption = f"the {top} with most of {len(ordered)} tables (--top N for more)"
    return table


def _place(table: TablePlacement) -> str:
    few = placement_of(replace(table, ranks=()))
    return placement_of(table) if len(table.ranks) <= _MOST_RANKS else f"{few} on {len(table.ranks)} ranks"


def _between(shown: PlanChange, row: int) -> Table:
    """Return bytes from rank to rank: all of few ranks, of many those pairs with most."""
    between, title = shown.moves.between, f"From rank to rank in row {row}"
    if len(between) <= _MOST_RANKS:
        table = make_table(title, (), ("from \\ to", *map(str, range(len(between)))), min_width=len(title))
        for rank, line in enumerate(between.tolist()):
            table.add_row(str(rank), *(size(count) if count else "" for count in line))
        return table
    table = make_table(title, (), ("from", "to", "bytes"), min_width=len(title))
    pairs = sorted(zip(*between.nonzero(), strict=True), key=lambda pair: -int(between[pair]))
    for pair in pairs[:_MOST_RANKS]:
        table.add_row(*map(str, pair), size(int(between[pair])))
    if len(pairs) > _MOST_RANKS:
        table.caption = f"the {_MOST_RANKS} pairs with most of {len(pairs)}"
    return table


def _answer(found: Replan) -> Sequence[str]:
    """Return which choice is best, and what that stands on."""
    if len(found.choices) == 1:
        return ["Stay: no plan was found that is faster by 0.5 % or more. No row moves."]
    best, fastest = found.best, found.choices[-1]
    through, fills = fastest.storage, f"{fastest.fills:,.0f} fills until all caches are warm"
    assert through is not None, "a change goes through the storage"
    stands_on = (
        f"For the best plan a node writes {size(through.written)}, checks {size(through.checked)} and reads "
        f"{size(through.read)}; {fills} take at most {duration(fastest.warm_up_seconds)}."
    )
    if best is None:
        saved = duration((found.steps or 0) * fastest.gain_seconds)
        answer = f"In {found.steps:,} steps the best plan saves {saved}: it pays if the change takes less."
    elif best is found.choices[0]:
        answer = f"Best for {found.steps:,} steps: stay. The best plan would pay after {fastest.pays_after:,} steps."
    else:
        what = f"{len(best.changed)} tables" if best.changed else "slots alone"
        answer = f"Best for {found.steps:,} steps: row {found.choices.index(best)}, a change of {what}, which pays "
        answer += f"after {best.pays_after:,} steps."
    return [answer, stands_on, found.storage_note]


def duration(seconds: float) -> str:
    """Format seconds.

    >>> duration(0.0025), duration(0.25), duration(90), duration(7200)
    ('2.5 ms', '0.25 s', '1.5 min', '2.0 h')
    """
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds * 1e3:.1f} ms" if 0 < seconds < 0.1 else f"{seconds:.2f} s"
