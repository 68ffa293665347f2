"""`embershard sweep`: the arguments. It trains all runs of a file, here or on a cluster, and gathers their results."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from embershard.errors import near_file
from embershard.launch.arguments import add_trust, make_parser

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
    "local": "embershard.sweeps.run:run_here",
    "ray": "embershard.extras.sweep_engines.on_ray:run_on_ray",
    "slurm": "embershard.extras.sweep_engines.on_slurm:run_on_slurm",
    "kubernetes": "embershard.extras.sweep_engines.on_kubernetes:run_on_kubernetes",
}


def main(argv: Sequence[str]) -> int:
    """Run `embershard sweep`; return the exit code."""
    arguments = _parser().parse_args(argv)
    from embershard.commands.sweep.run import run  # it loads pyarrow, and --help must answer at once

    return run(arguments, _ENGINES[arguments.on])


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
    from embershard.sweeps.spread import is_higher_better, judged_figures  # half a second, which --help does not take

    if is_higher_better(text) is None:
        needed = ", ".join(judged_figures())
        raise argparse.ArgumentTypeError(f"{text}: neither more nor less of it is known to be better; needed {needed}")
    return text


def _file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(
            f"{text}: there is no such file; give the TOML file of a sweep{near_file(Path(text))}"
        )
    return Path(text)
