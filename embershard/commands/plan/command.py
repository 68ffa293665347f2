"""`embershard plan`: the arguments. It places tables, sizes caches and predicts the result, without a GPU at hand."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar, get_args

from embershard.errors import ConfigError
from embershard.launch.arguments import (
    add_config_word,
    add_settings,
    add_trust,
    check_is_settings,
    check_output,
    make_parser,
    positive,
    set_words,
    whole,
)
from embershard.lazy_names import named
from embershard.settings.decoding import read_toml
from embershard.sharding.plan import Plan
from embershard.sharding.plan_diff import diff_lines
from embershard.sharding.sharding_types import COPIES, Sharding
from embershard.units import parse_bytes

N = TypeVar("N", int, float)

_HELP = """Place tables and size caches; predict memory, hit rates and step time.

  embershard plan run.toml --profile p.npz --topology h100x8 -o a.json
  embershard plan --tables tables.toml --topology h200x8 --target 5M/s
  embershard plan diff a.json b.json  # after drift: plan replan --help
"""
_MOST_EFFORT, _MOST_BYTES = 1000, 2**60
_SPEED = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMG]?)(/s|/h)?", re.IGNORECASE)
_FACTORS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}


def main(argv: Sequence[str]) -> int:
    """Run `embershard plan`, `plan diff` or `plan replan`; return 0, or 2 where no compared case fits.

    Raises:
        EmbershardError: an option, a setting or a file is wrong, or the model does not fit.
    """
    if argv[:1] == ["diff"]:
        return _diff(argv[1:])
    if argv[:1] == ["replan"]:
        return int(named("embershard.extras.replan.command:main")(argv[1:]))
    arguments = _parser().parse_intermixed_args(argv)
    if arguments.calibrate and arguments.output is None:
        raise ConfigError("--calibrate needs -o FILE.toml, where the measured topology goes.")
    for path in (arguments.output, arguments.png):
        if path is not None:
            check_output(path)
            if path in (arguments.config, arguments.tables, arguments.profile):
                raise ConfigError(f"-o {path}: the plan is made from this file; give another one.")
    if arguments.calibrate:
        run_calibration = named("embershard.extras.calibrate.calibrate:run_calibration")  # it loads TorchRec
        run_calibration(arguments.ranks or [1, 2, 4], arguments.output, quick=arguments.quick)
        return 0
    _check(arguments)
    from embershard.commands.plan.run import plan  # it loads torch, and --help must answer at once

    return plan(arguments, shlex.join(["embershard", "plan", *argv]))


def _check(arguments: argparse.Namespace) -> None:
    """Raise where what a plan needs is missing, or an option has no effect; say how a profile of these settings is
    made."""
    compared = (arguments.price, arguments.target, arguments.batches, arguments.global_batches, arguments.most_batch)
    if arguments.simulate and (any(compared) or len(arguments.topology) > 1):
        raise ConfigError(
            "--simulate takes one --topology, and neither --price nor --target: it compares no machines or batches."
        )
    if arguments.quick:
        raise ConfigError("--quick has no effect without --calibrate.")
    if arguments.tables is not None and arguments.profile is not None:
        raise ConfigError("--tables is for a plan without data: it takes no --profile.")
    if arguments.tables is None and arguments.config is None:
        raise ConfigError(
            "a plan needs a run's settings and a profile of its data. Give a file of settings or an example, and "
            "--profile FILE: embershard plan quickstart --profile profile.npz. Without data, "
            "give the numbers of its tables: --tables tables.toml"
        )
    if arguments.tables is None:
        check_is_settings(arguments.config)
        if "tables" in read_toml(arguments.config):
            raise ConfigError(
                f"{arguments.config} has tables as numbers, for a plan without data. Give it as --tables "
                f"{arguments.config}."
            )
    if arguments.tables is None and arguments.profile is None:
        words = ["--config", str(arguments.config), *set_words(arguments.overrides), "-o", "profile.npz"]
        raise ConfigError(
            f"--profile is missing: a plan is made from the frequencies of the data. Make a profile, and give it as "
            f"--profile profile.npz:  embershard profile {shlex.join(words)}"
        )


def _diff(argv: Sequence[str]) -> int:
    parser = make_parser("plan diff", "Say how two plans differ.\n\n  embershard plan diff a.json b.json\n")
    parser.add_argument("before", type=Path, metavar="A", help="a plan")
    parser.add_argument("after", type=Path, metavar="B", help="another one")
    arguments = parser.parse_args(argv)
    lines = diff_lines(Plan.load(arguments.before), Plan.load(arguments.after))
    print("\n".join(lines) or "The plans are equal.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("plan", _HELP, "[CONFIG] --profile FILE [options]")
    add_settings(parser)
    add_trust(parser)
    add_config_word(parser)
    parser.add_argument("--profile", type=Path, metavar="FILE", help="the data's frequencies (embershard profile)")
    parser.add_argument("--tables", type=Path, metavar="FILE", help="tables as numbers, for a plan without data")
    parser.add_argument("--ranks", type=_counts, metavar="N[,N...]", help="ranks; several, or 1..64: compare them")
    text = "samples of a rank, to compare: 1024..8192"
    parser.add_argument("--batches", type=_counts, metavar="N[,N...]", help=text)
    parser.add_argument("--global-batches", type=_counts, metavar="N", help="samples of all ranks together, the same")
    parser.add_argument("--most-batch", type=positive, metavar="N", help="samples of all ranks that still train well")
    parser.add_argument("--ratios", type=_numbers(float), metavar="R[,R...]", help="shares of the rows on the device")
    text = "limit of a rank: 72GiB; or of each: 72GiB,40GiB"
    parser.add_argument("--ranks-per-node", type=positive, metavar="N", help="(default: the topology's)")
    parser.add_argument("--device-memory", type=_memories, metavar="SIZE", help=text)
    parser.add_argument("--host-memory", type=_memory, metavar="SIZE", help="of one node: 512GiB")
    text = "machines to compare: h200x8, h100x8x4, cpu, a file"
    parser.add_argument("--topology", type=_names, default=["cpu"], metavar="M[,M...]", help=text)
    text = "of a rank for an hour; one, or one for each topology"
    parser.add_argument("--price", type=_numbers(float), metavar="P[,P...]", help=text)
    text = "5M/s: the cheapest; 40/h: the fastest for that money"
    parser.add_argument("--target", type=_target, metavar="N", help=text)
    parser.add_argument("--types", type=sharding_types, metavar="T[,T...]", help="sharding types that may be used")
    text = "replicate tables of up to N rows"
    parser.add_argument("--replicate-rows", type=whole, default=0, metavar="N", help=text)
    parser.add_argument("--effort", type=effort, default=1.0, metavar="N", help="search N times as long")
    parser.add_argument("--simulate", action="store_true", help="estimate how training scales, step by step")
    text = "the plan in five sentences, or a table's place"
    parser.add_argument("--explain", action="append", nargs="?", metavar="TABLE", help=text)
    parser.add_argument("--top", type=whole, default=12, metavar="N", help="tables to show, the largest first")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the plan, the comparison, or the simulation")
    parser.add_argument("-o", "--output", type=Path, metavar="F", help="where the plan (topology, simulation) goes")
    parser.add_argument("--calibrate", action="store_true", help="measure this machine and write a topology")
    parser.add_argument("--quick", action="store_true", help="with --calibrate: a rough measurement")
    return parser


def number_up_to(text: str, most: float) -> float:
    """Parse a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= most:
        raise argparse.ArgumentTypeError(f"got {text!r}; needed a number above 0, at most {most:g}")
    return value


#: Parses how many times as long a search takes.
effort = partial(number_up_to, most=_MOST_EFFORT)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"got {text!r}; needed names of machines with commas between them, each once")
    return names


class PlanTarget(NamedTuple):
    """Samples a second, wanted for the least money; or money for an hour, for which the most of them are wanted."""

    amount: float
    is_money: bool


def _target(text: str) -> PlanTarget:
    match = _SPEED.fullmatch(text)
    value = 0.0 if match is None else float(match[1]) * _FACTORS[(match[2] or "").upper()]
    if match is None or not 0 < value < _MOST_BYTES:
        needed = "samples a second, for instance 5M/s, 750K/s or 2e6; or money an hour: 40/h"
        raise argparse.ArgumentTypeError(f"got {text!r}; needed {needed}")
    return PlanTarget(value, match[3] in ("/h", "/H"))


def _memory(text: str) -> int:
    value = parse_bytes(text)
    if not 1 <= value <= _MOST_BYTES:
        raise argparse.ArgumentTypeError(f"got {text!r}; needed 1 to {_MOST_BYTES} bytes (an exbibyte)")
    return value


def _memories(text: str) -> list[int]:
    return [_memory(part) for part in text.split(",")]


def _numbers(kind: Callable[[str], N]) -> Callable[[str], list[N]]:
    def parse(text: str) -> list[N]:
        try:
            text.encode("ascii")  # Python knows the digits of all scripts
            values = [kind(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"got {text!r}; needed numbers with commas between them") from error
        if any(not value > 0 for value in values):  # NaN is not
            raise argparse.ArgumentTypeError(f"got {text!r}; needed numbers above 0")
        return values

    return parse


def _counts(text: str) -> list[int]:
    """Parse numbers of ranks or samples, or a range like `1..64`, whose numbers double."""
    first, dots, last = text.partition("..")
    if not dots:
        return _numbers(int)(text)
    (low,), (high,) = _numbers(int)(first), _numbers(int)(last)
    if low > high:
        raise argparse.ArgumentTypeError(f"got {text!r}; needed FEWEST..MOST, for instance 1..64")
    return [low * 2**power for power in range((high // low).bit_length())]


def sharding_types(text: str) -> list[str]:
    """Parse sharding types that a plan may use."""
    known = get_args(Sharding)
    types = text.split(",")
    unknown = [name for name in types if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"got {unknown[0]!r}; needed some of {', '.join(known)}")
    if types == [COPIES]:
        raise argparse.ArgumentTypeError(f"got {text!r}; needed another type beside it, for tables without copies")
    return types
