"""What `embershard sweep` does: starts the runs that have not ended, and shows what all gave together."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from embershard.launch.run_dir import lock_run_dir
from embershard.launch.screen import say, wide_console
from embershard.lazy_names import named
from embershard.reports.sweep_tables import SweepDisplay, spread_tables, write_configurations, write_results
from embershard.sweeps.experiments import Sweep, shown
from embershard.sweeps.outcomes import Outcome, begin_attempt, find_outcome
from embershard.sweeps.spread import best_sentence, read_configurations

#: What a file with the section `[scale_out]` asks for.
_STUDY = "embershard.extras.scale_out.study:Study"


def run(arguments: argparse.Namespace, engine: str) -> int:
    """Run the sweep that the arguments name by an engine, "module:function"; return the exit code."""
    sweep, console = Sweep.read(arguments.file, trust_code=arguments.trust_code), wide_console()
    folder = arguments.out or Path("sweeps") / arguments.file.stem
    if not arguments.dry_run:
        run_all = named(engine)
        lock_run_dir(folder, "--out")
    study = None if sweep.scale_out is None else named(_STUDY)(sweep, folder, console, is_dry=arguments.dry_run)
    sweep = sweep if study is None else study.prepared()
    if arguments.dry_run and arguments.on == "kubernetes":
        manifests = named(f"{engine.partition(':')[0]}:manifests")
        print(manifests(sweep, folder))
        return 0
    if arguments.dry_run:
        for experiment in sweep.experiments:
            say(console, experiment.command)
        return 0
    ended = {each.name: found for each in sweep.experiments if (found := find_outcome(each, folder)) is not None}
    if arguments.retry_failed:
        for name in [name for name, outcome in ended.items() if outcome.status != "finished"]:
            begin_attempt(folder, name)
            del ended[name]
    left = [experiment for experiment in sweep.experiments if experiment.name not in ended]
    say(console, f"{len(sweep.experiments)} runs, {len(left)} of them to do; everything goes to {folder}")
    display = SweepDisplay(console, folder, sweep.experiments, ended)

    def end(outcome: Outcome) -> None:
        ended[outcome.name] = outcome
        try:
            write_results(folder)
        except Exception as error:  # other runs go on, and they matter more than a table of those that ended
            say(console, f"Warning: the results so far could not be written ({type(error).__name__}: {error}).")
        display.end(outcome)

    with display.shown():
        run_all(sweep, left, folder, display.begin, end)
    write_results(folder)
    if not console.is_terminal:
        console.print(display.table())
    code = _end(folder, list(ended.values()), arguments.by, console)
    if study is not None:
        study.finish()
    return code


def _end(folder: Path, ended: Sequence[Outcome], figure: str | None, console: Console) -> int:
    """Write and show what all runs gave together; return the exit code."""
    configurations = read_configurations(folder)
    write_configurations(folder, configurations)
    if any(len(each.results) > 1 for each in configurations):
        for table in spread_tables(configurations, console.width):
            console.print(table)
    failed = [outcome for outcome in ended if outcome.status != "finished"]
    for outcome in failed:
        say(console, f"{outcome.status}: {shown(outcome.varied)}: {outcome.reason} (outputs/{outcome.name}.txt)")
    if best := best_sentence(configurations, figure):
        say(console, best)
    elif figure is not None:
        say(console, f"--by {figure}: no run that finished has this figure, so none is named the best.")
    say(console, f"Results: {folder / 'results.csv'} (runs) and {folder / 'configurations.csv'} (means); .parquet, too")
    return 1 if failed else 0
