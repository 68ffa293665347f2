"""`embershard ckpt`: lists, verifies, prunes and compares checkpoints."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from embershard.errors import ConfigError, InvalidCheckpointError
from embershard.launch.arguments import help_parts, make_parser, positive
from embershard.launch.screen import make_table, say, wide_console
from embershard.units import size

_HELP = """The checkpoints of a run, without training. Exit codes: 0; 1 for damage or a difference; 2 for wrong usage.

  embershard ckpt ls runs/mine
  embershard ckpt verify runs/mine
  embershard ckpt prune runs/mine --keep 1
  embershard ckpt diff runs/mine/checkpoints/step_100 runs/mine/checkpoints/step_200
"""


def main(argv: Sequence[str]) -> int:
    """Run `embershard ckpt`; return the exit code.

    Raises:
        EmbershardError: a folder holds no checkpoints, or cannot be read or changed.
    """
    arguments = _parser().parse_args(argv)
    return {"ls": _ls, "verify": _verify, "prune": _prune, "diff": _diff}[arguments.action](arguments)


def _ls(arguments: argparse.Namespace) -> int:
    from embershard.launch.ckpt import view  # loads torch, and --help must answer at once

    folder = _checkpoints(arguments.run_dir)
    table = make_table(str(folder), ["name", "run", "state"], ["size", "files", "written"])
    for row in view.listing(folder):
        table.add_row(*row)
    wide_console().print(table)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from embershard.distributed import complete_checkpoints, step_of
    from embershard.distributed.checkpoint.load import verify_alone

    folder, console = _checkpoints(arguments.run_dir), wide_console()
    found = [path for path in complete_checkpoints(folder) if arguments.step in (None, step_of(path))]
    if not found:
        of = "" if arguments.step is None else f" of step {arguments.step}"
        raise ConfigError(f"{folder} has no complete checkpoint{of}.")
    invalid = 0
    for path in found:
        started = time.perf_counter()
        try:
            manifest = verify_alone(path)
        except InvalidCheckpointError as error:
            invalid += 1
            say(console, f"INVALID  {error}")
            continue
        seconds = time.perf_counter() - started
        speed = f"{size(manifest.num_bytes)} in {seconds:.1f} s, {size(manifest.num_bytes / seconds)}/s"
        say(console, f"valid    {path}: {len(manifest.files)} files, {speed}")
    return 1 if invalid else 0


def _prune(arguments: argparse.Namespace) -> int:
    from embershard.launch.ckpt import view
    from embershard.launch.run_dir import lock_run_dir

    folder, console = _checkpoints(arguments.run_dir), wide_console()
    if not arguments.dry_run:
        lock_run_dir(folder.parent)  # a run that trains is not disturbed
    kept, going = view.to_prune(folder, arguments.keep)
    for path in going:
        if not arguments.dry_run:
            view.remove(path)
        say(console, f"{'would remove' if arguments.dry_run else 'removed'} {path}")
    say(console, f"kept: {', '.join(path.name for path in kept) or 'nothing'}")
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    from embershard.launch.ckpt import view

    table = make_table(f"{arguments.first} and {arguments.second}", ["what", "first", "second"], [])
    differences = list(view.differences(arguments.first, arguments.second))
    for row in differences:
        table.add_row(*row)
    if differences:
        wide_console().print(table)
    else:
        say(wide_console(), "The checkpoints are equal.")
    return 1 if differences else 0


def _checkpoints(run_dir: Path) -> Path:
    """Return the folder of the checkpoints, given the run's or itself."""
    from embershard.launch.config import CHECKPOINTS

    folder = run_dir / CHECKPOINTS if (run_dir / CHECKPOINTS).is_dir() else run_dir
    if not any(folder.glob("step_*")):
        raise ConfigError(f"{run_dir}: no checkpoints there; give the --run-dir of a run that saved some.")
    return folder


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("ckpt", _HELP)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, more, text in (
        ("ls", "", "list checkpoints; contents are not read"),
        ("verify", "", "compare every byte with the checksums"),
        ("prune", " --keep 1", "remove old checkpoints, and what runs left that died; the newest valid ones stay"),
    ):
        example = f"  embershard ckpt {name} runs/mine{more}\n"
        action = actions.add_parser(name, help=text, **help_parts(f"{text}\n\n{example}"))
        action.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of the run")
        if name == "verify":
            action.add_argument("step", type=int, nargs="?", metavar="STEP", help="only the checkpoint of this step")
        if name == "prune":
            action.add_argument("--keep", type=positive, required=True, metavar="N", help="valid checkpoints to keep")
            action.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    text = "compare two checkpoints: position, settings, and the values of all tensors"
    example = "  embershard ckpt diff runs/mine/checkpoints/step_100 runs/mine/checkpoints/step_200\n"
    diff = actions.add_parser("diff", help=text, **help_parts(f"{text}\n\n{example}"))
    diff.add_argument("first", type=Path, metavar="CHECKPOINT", help="folder step_N")
    diff.add_argument("second", type=Path, metavar="CHECKPOINT", help="folder step_N")
    return parser
