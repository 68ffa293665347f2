"""Starts the ranks of `embershard predict` and `embershard eval`."""

from __future__ import annotations

import argparse

from embershard.launch.arguments import make_parser, positive, set_words, trust_words
from embershard.launch.ranks import launcher
from embershard.launch.score.arguments import add_run, run_config


def parser_of(command: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of a command that scores."""
    parser = make_parser(command, description)
    add_run(parser)
    parser.add_argument("--nproc", type=positive, default=1, metavar="N", help="number of ranks (default: %(default)s)")
    launcher.add_hang_seconds(parser)
    return parser


def start(arguments: argparse.Namespace, more: list[str]) -> int:
    """Check the settings, start the ranks, and return the exit code."""
    config = run_config(arguments)
    config.train.rank_batch_size(arguments.nproc)  # raises before any rank starts
    given = [str(arguments.run_dir), *more]
    given += [] if arguments.step is None else ["--step", str(arguments.step)]
    given += [] if arguments.data is None else ["--data", arguments.data]
    given += set_words(arguments.overrides) + trust_words(arguments)
    return launcher.start_ranks(
        arguments.nproc,
        "embershard.launch.score.command",
        given,
        hang_seconds=arguments.hang_seconds or None,
        stacks=arguments.run_dir / "stacks.txt",
    )
