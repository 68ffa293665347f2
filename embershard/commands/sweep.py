"""`embershard sweep`: trains all runs of a file, here or on a cluster, and gathers their results."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name

from rich.console import Console

from embershard.launch.arguments import add_trust, make_parser
from embershard.launch.run_dir import lock_run_dir
from embershard.launch.screen import say, wide_console
from embershard.sweeps.experiments import Sweep, shown
from embershard.sweeps.on_kubernetes import manifests
from embershard.sweeps.outcomes import Outcome, begin_attempt, find_outcome
from embershard.sweeps.spread import JUDGED, best_sentence, is_higher_better, read_configurations

_HELP = """Train all runs that a TOML file describes, each in a folder of its own, and gather their results in
results.parquet and results.csv. Repeats are interleaved. The same command goes on where an earlier one stopped: runs
that ended are not started again. Exit codes: 0 all runs finished; 1 some did not; 2 wrong usage; 130 Ctrl-C.

  config = "quickstart.toml"         # what all runs have in common, relative to this file
  repeats = 2
  time_limit_seconds = 600           # of a run
  set.train.max_steps = 200          # settings of all runs
  [grid]                             # all combinations
  ranks = [1, 2]
  cache.ratio = [0.005, 0.015]

  embershard sweep experiments.toml
  embershard sweep experiments.toml --out sweeps/ratios --retry-failed --by samples_per_second
  embershard sweep experiments.toml --on kubernetes --dry-run
"""

#: By name, the module and the function that run the experiments of a sweep.
_ENGINES = {
    "local": "run:run_here",
    "ray": "on_ray:run_on_ray",
    "slurm": "on_slurm:run_on_slurm",
    "kubernetes": "on_kubernetes:run_on_kubernetes",
}


def main(argv: Sequence[str]) -> int:
    """Run `embershard sweep`; return the exit code."""
    arguments = _parser().parse_args(argv)
    from embershard.reports.sweep_tables import SweepDisplay, write_results  # it loads pyarrow

    sweep, console = Sweep.read(arguments.file, trust_code=arguments.trust_code), wide_console()
    folder = arguments.out or Path("sweeps") / arguments.file.stem
    if arguments.dry_run and arguments.on == "kubernetes":
        print(manifests(sweep, folder))
        return 0
    if arguments.dry_run:
        for experiment in sweep.experiments:
            say(console, f"embershard train {shlex.join(experiment.arguments)}")
        return 0
    run_all = resolve_name(f"embershard.sweeps.{_ENGINES[arguments.on]}")
    lock_run_dir(folder, "--out")
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
    return _end(folder, list(ended.values()), arguments.by, console)


def _end(folder: Path, ended: Sequence[Outcome], figure: str | None, console: Console) -> int:
    """Write and show what all runs gave together; return the exit code."""
    from embershard.reports.sweep_tables import spread_tables, write_configurations

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


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("sweep", _HELP)
    parser.add_argument("file", type=_file, metavar="FILE", help="the sweep, a TOML file")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the sweep (default: sweeps/NAME)")
    add_trust(parser)
    parser.add_argument("--dry-run", action="store_true", help="check all settings, print commands or manifests, stop")
    parser.add_argument("--retry-failed", action="store_true", help="start runs that failed again, too")
    text = "name the best by this: auc, loss, samples_per_second"
    parser.add_argument("--by", type=_figure, metavar="NAME", help=text)
    parser.add_argument("--on", choices=_ENGINES, default="local", help="where to run (default: %(default)s)")
    return parser


def _figure(text: str) -> str:
    if is_higher_better(text) is None:
        needed = ", ".join(JUDGED)
        raise argparse.ArgumentTypeError(f"{text}: neither more nor less of it is known to be better; needed {needed}")
    return text


def _file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text}: there is no such file; give the TOML file of a sweep")
    return Path(text)
