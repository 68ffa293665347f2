"""A sweep on the screen: a live table on a terminal, elsewhere a line for each run that ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from embershard.launch.quality_text import form_of, main_names, title_of
from embershard.launch.screen import make_table, number, say
from embershard.launch.sweep.experiments import Experiment
from embershard.launch.sweep.outcomes import Outcome, read_result


class SweepDisplay:
    """What becomes of the runs of a sweep.

    Args:
        console: to show it on.
        sweep: the sweep's folder.
        experiments: all of them, in the order of their execution.
        outcomes: of those that ended before.
    """

    def __init__(
        self, console: Console, sweep: Path, experiments: Sequence[Experiment], outcomes: Mapping[str, Outcome]
    ) -> None:
        self._console, self._sweep, self._experiments = console, sweep, experiments
        self._outcomes, self._running = dict(outcomes), set[str]()
        self._live: Live | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Return a context in which a terminal shows the table."""
        if not self._console.is_terminal:
            yield
            return
        with Live(self.table(), console=self._console, refresh_per_second=1) as self._live:
            yield
        self._live = None

    def begin(self, experiment: Experiment) -> None:
        """Show that a run was started."""
        self._running.add(experiment.name)
        self._refresh()

    def end(self, outcome: Outcome) -> None:
        """Show what became of a run."""
        self._running.discard(outcome.name)
        self._outcomes[outcome.name] = outcome
        if not self._console.is_terminal:
            what = f"{outcome.status}{': ' + outcome.reason if outcome.reason else ''}"
            place = f"[{len(self._outcomes)}/{len(self._experiments)}]"
            say(self._console, f"{place} {outcome.shown}, repeat {outcome.repeat + 1}: {what}")
        self._refresh()

    def table(self) -> Table:
        """Return the table of all runs."""
        varied = list(dict.fromkeys(key for each in self._experiments for key in each.varied))
        ended = [each.name for each in self._experiments if each.name in self._outcomes]
        results = {name: read_result(self._sweep, name) for name in ended}
        names, right = main_names(results.values()), ["seconds", "samples/s", "loss"]
        table = make_table(str(self._sweep), ["state", *varied, "repeat"], [*right, *map(title_of, names)])
        for experiment in self._experiments:
            outcome = self._outcomes.get(experiment.name)
            waiting = "running" if experiment.name in self._running else "waiting"
            result = results.get(experiment.name, {})
            table.add_row(
                waiting if outcome is None else outcome.status,
                *(str(experiment.varied.get(key, "")) for key in varied),
                str(experiment.repeat + 1),
                number(None if outcome is None else outcome.seconds, ".1f"),
                number(result.get("samples_per_second"), ",.0f"),
                number(result.get("loss"), ".5f"),
                *(number(result.get(name), form_of(name)) for name in names),
            )
        return table

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self.table())
