"""Arguments that several commands have in common."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from embershard.decoding import toml
from embershard.errors import ConfigError

NEWEST = -1  # --resume without a step


def make_parser(command: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of `embershard COMMAND`; its help shows the description as it is written."""
    return argparse.ArgumentParser(
        prog=f"embershard {command}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_settings(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add `--config FILE` and `--set KEY=VALUE`; the overrides become the list `overrides`."""
    parser.add_argument(
        "--config", type=Path, required=required, metavar="FILE", help="the run's settings, a TOML file"
    )
    add_overrides(parser, "override a setting, for instance train.batch_size=512; may be repeated")


def add_overrides(parser: argparse.ArgumentParser, text: str) -> None:
    """Add `--set KEY=VALUE` with this help; the overrides become the list `overrides`."""
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=text)


def set_words(overrides: Iterable[str]) -> list[str]:
    """Return the words of a command that have these overrides.

    >>> set_words(["train.epochs=2", "data.seed=4"])
    ['--set', 'train.epochs=2', '--set', 'data.seed=4']
    """
    return [word for override in overrides for word in ("--set", override)]


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add `--plan FILE`, which becomes one of the `overrides`."""
    parser.add_argument(
        "--plan",
        dest="overrides",
        action="append",
        type=partial(text_override, "sharding.plan"),
        default=[],
        metavar="FILE",
        help="obey a plan of embershard plan; the same as --set sharding.plan=FILE",
    )


def text_override(key: str, text: str) -> str:
    """Return the override that sets `key` to a text, whatever characters it has.

    >>> print(text_override("data.path", "/a b"))
    data.path="/a b"
    """
    return f"{key}={toml(text)}"


def positive(text: str) -> int:
    """Read a whole number of at least 1; a type for argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; needed a whole number, 1 or more")
    return int(text)


def whole(text: str) -> int:
    """Read a whole number of at least 0; a type for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}; needed a whole number, 0 or more")
    return int(text)


def check_output(path: Path) -> None:
    """Raise `ConfigError` unless a file can be written at `path`: before hours of work, not after."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        problem = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise ConfigError(f"{path} {problem}; give the name of a file in a folder that exists.")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `embershard train` and the program of each rank have in common."""
    add_settings(parser, required=True)
    add_plan(parser)
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="folder for the run's files (default: runs/NAME-TIME)"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        type=_step,
        const=NEWEST,
        metavar="STEP",
        help="continue from the newest valid checkpoint in --run-dir, or from that of STEP",
    )
    parser.add_argument(
        "--unverified",
        action="store_true",
        help="with --resume: also take a checkpoint without a manifest, of which nothing can be verified",
    )
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="with --resume: go on though this setting is another one than in the checkpoint; may be repeated",
    )


def check_resume(arguments: argparse.Namespace) -> None:
    """Raise `ConfigError` where an argument of the resume has no effect."""
    if arguments.resume is not None and arguments.run_dir is None:
        raise ConfigError("--resume needs --run-dir, the folder of the run to continue.")
    if arguments.unverified and arguments.resume is None:
        raise ConfigError("--unverified has no effect without --resume.")
    if arguments.allow_change and arguments.resume is None:
        raise ConfigError("--allow-change has no effect without --resume.")
    if arguments.allow_change:
        from embershard.training.identity import check_keys  # it loads TorchRec

        check_keys(arguments.allow_change)


def _step(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}; needed the step of a checkpoint, or nothing for the newest")
    return int(text)
