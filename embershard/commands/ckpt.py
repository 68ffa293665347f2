"""`embershard ckpt`: lists, verifies, compacts, prunes and compares checkpoints."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embershard import distributed  # its names load torch when they are used, and --help must answer at once
from embershard.distributed import complete_checkpoints, step_of
from embershard.distributed.checkpoint.folder import (
    ASIDE,
    best_checkpoint,
    checkpoints_for,
    folder_bytes,
    leftovers,
    remove,
)
from embershard.errors import CheckpointError, ConfigError, InvalidCheckpointError, os_problem
from embershard.launch.arguments import help_parts, make_parser, positive
from embershard.launch.run_dir import lock_run_dir
from embershard.launch.screen import make_table, say, wide_console
from embershard.settings.decoding import flat
from embershard.settings.files import CHECKPOINTS
from embershard.units import size

if TYPE_CHECKING:
    from torch import Tensor

_HELP = """The checkpoints of a run, without training. Exit codes: 0; 1 for damage or a difference; 2 for wrong usage.

  embershard ckpt ls runs/mine
  embershard ckpt verify runs/mine
  embershard ckpt compact runs/mine
  embershard ckpt prune runs/mine --keep 1
  embershard ckpt diff runs/mine/checkpoints/step_100 runs/mine/checkpoints/step_200
"""


def main(argv: Sequence[str]) -> int:
    """Run `embershard ckpt`; return the exit code.

    Raises:
        EmbershardError: a folder holds no checkpoints, or cannot be read or changed.
    """
    arguments = _parser().parse_args(argv)
    actions = {"ls": _ls, "verify": _verify, "compact": _compact, "prune": _prune, "diff": _diff}
    return actions[arguments.action](arguments)


def _ls(arguments: argparse.Namespace) -> int:
    folder = _checkpoints(arguments.run_dir)
    table = make_table(str(folder), ["name", "run", "state"], ["size", "files", "written"])
    for row in listing(folder):
        table.add_row(*row)
    wide_console().print(table)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from embershard.distributed.checkpoint.load import verify_alone

    folder, console = _checkpoints(arguments.run_dir), wide_console()
    found, sound = _asked_for(folder, arguments.step), set[Path]()
    invalid = 0
    for path in found:
        started = time.perf_counter()
        try:
            manifest = verify_alone(path, sound)
        except InvalidCheckpointError as error:
            invalid += 1
            say(console, f"INVALID  {error}")
            continue
        seconds = time.perf_counter() - started
        speed = f"{size(manifest.num_bytes)} in {seconds:.1f} s, {size(manifest.num_bytes / seconds)}/s"
        say(console, f"valid    {path}: {len(manifest.files)} files, {speed}")
    return 1 if invalid else 0


def _asked_for(folder: Path, step: int | None) -> list[Path]:
    """Return the complete checkpoints, or that of a step."""
    found = checkpoints_for(folder, step)
    if not found:
        raise ConfigError(f"{folder} has no complete checkpoint.")
    return found


def _compact(arguments: argparse.Namespace) -> int:
    from embershard.distributed.checkpoint.compact import compact

    folder, console = _checkpoints(arguments.run_dir), wide_console()
    path = _asked_for(folder, arguments.step)[-1]
    lock_run_dir(folder.parent)  # a run that trains may remove it
    was_whole = distributed.Manifest.read(path).parent is None
    try:
        manifest = compact(path)
    except OSError as error:
        raise CheckpointError(f"{path} is as it was: {os_problem(error, path)}") from error
    done = "was whole" if was_whole else f"is whole now, {size(manifest.num_bytes)}, and needs no other checkpoint"
    say(console, f"{path} {done}")
    return 0


def _prune(arguments: argparse.Namespace) -> int:
    folder, console = _checkpoints(arguments.run_dir), wide_console()
    if not arguments.dry_run:
        lock_run_dir(folder.parent)  # a run that trains is not disturbed
    from embershard.distributed.checkpoint.compact import remove_unlisted

    kept, going = to_prune(folder, arguments.keep)
    for path in () if arguments.dry_run else kept:
        if distributed.Manifest.read(path).token:
            remove_unlisted(path)
    for path in going:
        if not arguments.dry_run:
            remove(path)
        say(console, f"{'would remove' if arguments.dry_run else 'removed'} {path}")
    say(console, f"kept: {', '.join(path.name for path in kept) or 'nothing'}")
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    table = make_table(f"{arguments.first} and {arguments.second}", ["what", "first", "second"], [])
    for row in differences(arguments.first, arguments.second):
        table.add_row(*row)
    if table.row_count:
        wide_console().print(table)
    else:
        say(wide_console(), "The checkpoints are equal.")
    return 1 if table.row_count else 0


def _checkpoints(run_dir: Path) -> Path:
    """Return the folder of the checkpoints, given the run's or itself."""
    folder = run_dir / CHECKPOINTS if (run_dir / CHECKPOINTS).is_dir() else run_dir
    if not any(folder.glob("step_*")):
        raise ConfigError(f"{run_dir}: no checkpoints there; give the folder of a run that saved some.")
    return folder


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("ckpt", _HELP)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, more, text in (
        ("ls", "", "list checkpoints; contents are not read"),
        ("verify", "", "compare every byte with the checksums, and those of checkpoints that others need"),
        ("compact", "", "make the newest checkpoint, or that of a step, whole: it needs no other one then"),
        (
            "prune",
            " --keep 1",
            "remove old checkpoints, and what runs left that died; the newest valid ones and the best stay, and what "
            "these need",
        ),
    ):
        example = f"  embershard ckpt {name} runs/mine{more}\n"
        action = actions.add_parser(name, help=text, **help_parts(f"{text}\n\n{example}"))
        action.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of the run")
        if name in ("verify", "compact"):
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


def listing(folder: Path) -> Iterator[tuple[str, ...]]:
    """Yield name, run, state, size, number of files and time of every checkpoint; files are not read."""
    found = [path for path in folder.glob("step_*") if path.is_dir()]
    best, _ = best_checkpoint(folder)
    for path in sorted(found, key=lambda path: (step_of(path) is None, step_of(path) or 0, path.name)):
        run, state = "", "unfinished" if path.suffix == ".tmp" else "set aside"
        if step_of(path) is not None:
            state = "complete"
            try:
                manifest = distributed.Manifest.read(path)
                run, problem = manifest.run_id[:8], manifest.wrong_size(path)
                if manifest.parent is not None:
                    state = f"{state}, follows step_{manifest.parent.step}"
                state = problem or (f"{state}, the best" if path == best else state)
            except InvalidCheckpointError as error:
                state = str(error).partition(": ")[2]
        files = [file for file in path.iterdir() if file.is_file()]
        written = datetime.fromtimestamp(path.stat().st_mtime)
        yield path.name, run, state, size(folder_bytes(path)), str(len(files)), f"{written:%Y-%m-%d %H:%M}"


def to_prune(folder: Path, keep: int) -> tuple[list[Path], list[Path]]:
    """Return the newest `keep` valid checkpoints with that of the best evaluation, if it is valid, and all that these
    need; and all else that may go, invalid ones among it, and what needs another one before that.

    Raises:
        InvalidCheckpointError: no checkpoint is valid: then none goes.
    """
    from embershard.distributed.checkpoint.chain import needed_by
    from embershard.distributed.checkpoint.load import verify_alone  # loads torch, and a list needs it not

    kept, sound = list[Path](), set[Path]()
    best, _ = best_checkpoint(folder)
    for path in reversed(complete_checkpoints(folder)):
        try:
            if (len(kept) < keep or path == best) and verify_alone(path, sound):
                kept.append(path)
        except InvalidCheckpointError:
            continue
    if not kept:
        raise InvalidCheckpointError(f"{folder} has no valid checkpoint, so none is removed. Remove folders by hand.")
    needed = needed_by(kept)
    kept += sorted(needed.difference(kept), key=lambda path: -(step_of(path) or 0))
    others = [path for path in reversed(complete_checkpoints(folder)) if path not in needed]
    return kept, [*others, *leftovers(folder), *sorted(folder.glob(f"step_*{ASIDE}*"))]


def differences(first: Path, second: Path) -> Iterator[tuple[str, str, str]]:
    """Yield how two valid checkpoints differ: name, in the first, in the second. Reads one tensor at a time."""
    from embershard.distributed.checkpoint.load import BoxReader, verify_alone

    manifests = [verify_alone(path) for path in (first, second)]
    if manifests[0].run_id != manifests[1].run_id:
        yield "run", manifests[0].run_id, manifests[1].run_id
    values = [flat(distributed.read_scalars(path)) for path in (first, second)]
    for name in sorted(values[0].keys() | values[1].keys()):
        pair = [repr(found[name])[:40] if name in found else "" for found in values]
        if values[0].get(name) != values[1].get(name):
            yield name, pair[0], pair[1]
    readers = BoxReader(first), BoxReader(second)
    entries = [reader.tensors for reader in readers]
    for name in sorted(entries[0].keys() | entries[1].keys()):
        kinds = [_kind(found.get(name)) for found in entries]
        if kinds[0] != kinds[1]:
            yield name, kinds[0], kinds[1]
        elif (changed := _changed(*(each.read_whole(name) for each in readers))) is not None:
            yield name, kinds[0], changed


def _changed(first: Tensor, second: Tensor) -> str | None:
    different = first != second
    count = int(different.sum())
    if not count:
        return None
    largest = (first.double() - second.double()).abs().max()
    return f"{count:,} of {different.numel():,} values differ, by {largest:.3g} at most"


def _kind(entry: Any) -> str:
    return "" if entry is None else f"{str(entry.properties.dtype).removeprefix('torch.')} {list(entry.size)}"
