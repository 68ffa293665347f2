"""The arguments of `embershard train` by which a run begins with a trained model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from embershard.errors import ConfigError
from embershard.launch.arguments import is_whole
from embershard.settings.decoding import toml
from embershard.training.warm_start import WarmStart

if TYPE_CHECKING:
    from embershard.training.config import RunConfig


def add_warm_start(parser: argparse.ArgumentParser) -> None:
    """Add the arguments. The help, which fits a screen, names the page that describes them."""
    text = "begin with a trained model: docs/warm_start.md"
    parser.add_argument("--from", dest="source", type=Path, metavar="DIR", help=text)
    hidden = argparse.SUPPRESS
    parser.add_argument("--step", type=_step, metavar="STEP", help=hidden)
    parser.add_argument("--map", action="append", type=_renamed, default=[], metavar="OLD=NEW", help=hidden)
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help=hidden)
    parser.add_argument("--keep-steps", action="store_true", help=hidden)
    parser.add_argument("--freeze", action="append", default=[], metavar="TABLE", help=hidden)


def warm_start_of(arguments: argparse.Namespace) -> WarmStart | None:
    """Return what the run is to begin with; None for nothing.

    Raises:
        ConfigError: an argument has no effect.
    """
    if arguments.source is None:
        options = {"--step": arguments.step, "--map": arguments.map, "--without": arguments.without}
        for option, value in {**options, "--keep-steps": arguments.keep_steps}.items():
            if value:
                raise ConfigError(f"{option} has no effect without --from, the folder of a run or an export.")
        return None
    if arguments.resume is not None:
        raise ConfigError(
            "--from and --resume: a run that is resumed has begun already, with what its checkpoint has. Leave --from "
            "out to go on, or give --from a new --run-dir."
        )
    return WarmStart(
        arguments.source.absolute(),
        arguments.step,
        tuple(arguments.map),
        tuple(arguments.without),
        arguments.keep_steps,
    )


def frozen_overrides(arguments: argparse.Namespace, config: RunConfig) -> list[str]:
    """Return the overrides of settings by which `--freeze` freezes more tables than the settings do."""
    if not arguments.freeze:
        return []
    return [f"model.frozen={toml(list(dict.fromkeys([*config.model.frozen, *arguments.freeze])))}"]


def words_of(start: WarmStart | None) -> list[str]:
    """Return the words of a command that has these arguments.

    >>> words_of(WarmStart(Path("runs/a"), 20, (("item", "product"),), ("optimizer",)))
    ['--from', 'runs/a', '--step', '20', '--map', 'item=product', '--without', 'optimizer']
    """
    if start is None:
        return []
    words = ["--from", str(start.path), *([] if start.step is None else ["--step", str(start.step)])]
    words += [word for old, new in start.renames for word in ("--map", f"{old}={new}")]
    words += [word for name in start.without for word in ("--without", name)]
    return [*words, *(["--keep-steps"] if start.keep_steps else [])]


def _step(text: str) -> int | Literal["best"]:
    if text != "best" and not is_whole(text):
        raise argparse.ArgumentTypeError(f"got {text!r}; needed the step of a checkpoint, or best")
    return "best" if text == "best" else int(text)


def _renamed(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise argparse.ArgumentTypeError(f"got {text!r}; needed OLD=NEW, for instance item=product")
    return old, new
