"""`embershard plan replan`: a plan under a new profile, and which change of it pays."""

from __future__ import annotations

import argparse
import itertools
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from embershard.commands.plan.command import effort, number_up_to, sharding_types
from embershard.commands.plan.run import read_setups, train_words
from embershard.errors import ConfigError, EmbershardError
from embershard.extras.replan.replan import Replan, replan
from embershard.extras.replan.view import show
from embershard.launch.arguments import (
    add_settings,
    add_trust,
    check_is_settings,
    check_output,
    make_parser,
    positive,
    whole,
)
from embershard.launch.screen import progress_bar, say, wide_console
from embershard.planning.cost.topology import load_topology
from embershard.sharding.plan import Plan
from embershard.units import parse_bytes

_HELP = """Is a new plan worth the rows that move? Compare a plan, under a new profile, with changes of it.

  embershard plan replan old.json --config run.toml --profile new.npz
  embershard plan replan old.json --config run.toml --profile new.npz \\
      --topology h100x8 --storage 2GiB/s --steps 100000 -o new.json
"""
#: Options of `embershard plan` that say which places and slots a plan may have.
_OF_OLD = ("--types", "--replicate-rows", "--ratios")


def main(argv: Sequence[str]) -> int:
    """Run `embershard plan replan`.

    Raises:
        EmbershardError: a setting or a file is wrong, the old plan is of another model, or it does not fit any more.
    """
    old = Plan.load(_parser().parse_args(argv).old)
    argv = [*argv, *_inherited(old, argv)]
    arguments = _parser().parse_args(argv)
    has_data = arguments.config is not None and arguments.profile is not None
    if (arguments.profile is None) == (arguments.tables is None) or not (has_data or arguments.tables):
        raise ConfigError(
            "a replan needs the run's settings and a new profile (--config RUN.toml --profile NEW.npz), or without "
            "data numbers of tables (--tables tables.toml)."
        )
    if arguments.take is not None and arguments.output is None:
        raise ConfigError("--take has no effect without -o: it says which row's plan is written.")
    if arguments.config is not None:
        check_is_settings(arguments.config)
    if arguments.output is not None:
        check_output(arguments.output)
        if arguments.output in (arguments.config, arguments.profile, arguments.tables):
            raise ConfigError(f"-o {arguments.output}: the plan is made from this file; give another one.")
    console = wide_console()
    with console.status("reading settings and profile"):
        command = shlex.join(["embershard", "plan", "replan", *argv])
        (setup,) = read_setups(_within_limits_of(arguments, old), command)
        request = setup.request(old.world_size, arguments.ratios)
    try:
        with progress_bar(console, "plans predicted") as on_progress:
            found = replan(
                old,
                request,
                steps=arguments.steps,
                storage_bytes_per_second=arguments.storage,
                resume_seconds=arguments.resume_seconds,
                stops_anyway=arguments.stops,
                progress=on_progress,
            )
    except EmbershardError as error:
        raise type(error)(f"{arguments.old}: {error}") from error
    show(found, console, arguments.top)
    if arguments.output is not None:
        _write(found, arguments)
        words = train_words(arguments, old.world_size)
        go_on = f" Go on with it:  embershard train {words} --resume --run-dir RUN" if setup.model is None else ""
        say(console, f"Written to {arguments.output}.{go_on}")
    return 0


def _write(found: Replan, arguments: argparse.Namespace) -> None:
    """Write the plan of a row of the table: the one that was asked for, or the best."""
    choice = found.best
    if arguments.take is not None:
        if arguments.take >= len(found.choices):
            raise ConfigError(f"--take {arguments.take}: needed a row of the table, 0 to {len(found.choices) - 1}.")
        choice = found.choices[arguments.take]
    if choice is None:
        raise ConfigError(
            "-o: which plan is best is not told. Give the steps until the next replan (--steps) and what a resume "
            "takes (--storage or --resume-seconds), or choose a row of the table (--take)."
        )
    found.plan(choice).save(arguments.output)


def _within_limits_of(arguments: argparse.Namespace, old: Plan) -> argparse.Namespace:
    """Return the arguments of `embershard plan` for a plan within the old one's limits, and on the devices that there
    are now."""
    machine = load_topology(arguments.topology)
    devices = machine.memory_of_ranks(old.world_size) or (machine.device_memory_bytes,) * old.world_size
    limits = [min(limit, device or limit) for limit, device in zip(old.device_limits, devices, strict=False)]
    values = {
        "device_memory": limits or None,
        "host_memory": old.host_memory_bytes,
        "ranks_per_node": old.ranks_per_node,
        "price": None,
        "simulate": False,
        "topology": [arguments.topology],
    }
    return argparse.Namespace(**{**vars(arguments), **values})


def _inherited(old: Plan, argv: Sequence[str]) -> list[str]:
    """Return the words that the new plan has of the old one's command: what places it may choose from."""
    words, found = old.made_from.get("command", "").split(), list[str]()
    for option in _OF_OLD:
        told = [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
        told += [value for word, value in itertools.pairwise(words) if word == option]
        if told and not any(word.partition("=")[0] == option for word in argv):
            found += [option, told[-1]]
    return found


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("plan replan", _HELP, "OLD.json --config FILE --profile FILE [options]")
    parser.add_argument("old", type=Path, metavar="OLD.json", help="the plan that the run trains by")
    add_settings(parser)
    add_trust(parser)
    parser.add_argument("--profile", type=Path, metavar="FILE", help="frequencies of new data (embershard profile)")
    parser.add_argument("--tables", type=Path, metavar="FILE", help="in place of both: tables as numbers, new ones")
    parser.add_argument("--topology", default="cpu", metavar="M", help="the machine: h200x8, h100x8x4, cpu, a file")
    text = "until the next replan (default: of the run)"
    parser.add_argument("--steps", type=positive, metavar="N", help=text)
    text = "of checkpoints, for each node: 2GiB/s"
    parser.add_argument("--storage", type=_rate, metavar="RATE", help=text)
    text = "what a stop and a resume took"
    parser.add_argument("--resume-seconds", type=partial(number_up_to, most=1e9), metavar="S", help=text)
    text = "the run stops anyway: its stop costs nothing"
    parser.add_argument("--stops", action="store_true", help=text)
    text = "sharding types that may be used"
    parser.add_argument("--types", type=sharding_types, metavar="T[,T...]", help=text)
    text = "(of all three, default: the old plan's)"
    parser.add_argument("--replicate-rows", type=whole, default=0, metavar="N", help="as of plan")
    parser.add_argument("--ratios", type=partial(number_up_to, most=1.0), metavar="R", help=f"as of plan, one {text}")
    parser.add_argument("--effort", type=effort, default=1.0, metavar="N", help="as of plan")
    parser.add_argument("--top", type=whole, default=8, metavar="N", help="tables to show")
    parser.add_argument("--take", type=whole, metavar="ROW", help="write this row, in place of the best")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="where the best plan goes")
    return parser


def _rate(text: str) -> int:
    value = parse_bytes(text.removesuffix("/s"))
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; needed bytes a second, for instance 2GiB/s")
    return value
