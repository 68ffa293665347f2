"""The command `embershard`: finds the subcommand, and reports its errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from embershard import __version__
from embershard.errors import EmbershardError, os_problem

#: Name, module below `embershard.launch` with the function `main(argv) -> int`, and help of each command.
_COMMANDS = (
    ("train", "train.start", "train a model"),
    ("settings", "settings", "list all settings of a run, with their meanings"),
    ("profile", "profile.command", "count how often every row of a data set is looked up, or show such a profile"),
    ("plan", "plan.command", "place tables and size caches, without a GPU at hand; predict memory and speed"),
    ("data", "data.command", "look at files of data, convert them, check them, or make samples of a log of events"),
    ("verify", "verify.start", "train the first steps with the cache and with stock TorchRec, and compare every bit"),
    ("predict", "score.predict", "score samples with a trained model, into a Parquet file"),
    ("eval", "score.evaluate", "measure a trained model on held-out or other samples"),
    (
        "export",
        "export.command",
        "write tables, a plain torch module and the mapping of ids, to serve without embershard",
    ),
    ("sweep", "sweep.command", "train many runs from one file, and gather their results in a table"),
    ("report", "report.command", "show what a run gave beside its plan, or draw runs and sweeps on a page"),
    ("ckpt", "ckpt.command", "list, verify, prune or compare the checkpoints of a run"),
    ("doctor", "doctor.command", "check whether this machine can train, and say what to do if not"),
    ("bench", "bench.command", "run benchmarks, and compare their figures with stored ones"),
    ("completion", "completion", "print what makes Tab complete commands in bash, zsh or fish"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code: 0 done, 1 failed, 2 wrong usage, settings or data, 130 Ctrl-C."""
    arguments = _words() if argv is None else list(argv)
    for name, module, _ in _COMMANDS:
        if arguments[:1] == [name]:
            # Imported here: most commands load torch and TorchRec, the others answer at once.
            try:
                return import_module(f"embershard.launch.{module}").main(arguments[1:])
            except EmbershardError as error:
                print(f"embershard: {error}", file=sys.stderr)
                return 2
            except BrokenPipeError:  # the reader of the output has seen enough
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 1
            except OSError as error:
                print(f"embershard: {os_problem(error)}", file=sys.stderr)
                return 2
            except KeyboardInterrupt:
                print("embershard: stopped.", file=sys.stderr)
                return 130
    from embershard.launch.arguments import Parser

    parser = Parser(
        prog="embershard",
        description="Train recommendation models whose embedding tables are larger than device memory.",
        epilog="For instance:  embershard train quickstart",
    )
    parser.add_argument("--version", action="version", version=f"embershard {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, _, text in _COMMANDS:
        commands.add_parser(name, help=text)
    parser.parse_args(arguments)  # shows the help or the version, or refuses the command
    return 2


def _words() -> list[str]:
    """Return the words behind the program: those of the command line, or those before the cursor where argcomplete asks
    for completions."""
    if "_ARGCOMPLETE" not in os.environ:
        return sys.argv[1:]
    before = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    words = before.split()
    return words[1:] if len(words) > 2 or before.endswith(" ") else []  # the command itself may be unfinished


if __name__ == "__main__":
    sys.exit(main())
