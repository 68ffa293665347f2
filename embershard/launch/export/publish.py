"""`embershard publish`: lists and verifies publications, and makes a base of deltas."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from embershard.errors import CheckpointError, ConfigError
from embershard.launch.arguments import help_parts, make_parser
from embershard.launch.screen import make_table, say, wide_console
from embershard.units import size

_HELP = """The publications of a run, from which replicas serve. Exit codes: 0; 1 for damage; 2 for wrong usage.

  embershard publish ls published
  embershard publish verify published
  embershard publish base published
"""


def main(argv: Sequence[str]) -> int:
    """Run `embershard publish`; return the exit code.

    Raises:
        EmbershardError: a folder has no publications, or no base can be made.
    """
    arguments = _parser().parse_args(argv)
    return {"ls": _ls, "verify": _verify, "base": _base}[arguments.action](arguments.folder)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("publish", _HELP)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in (
        ("ls", "list bases and deltas; contents are not read"),
        ("verify", "compare every byte with its checksum, and each delta with the one before it"),
        ("base", "make a base of the newest one and the deltas after it, which replicas start from"),
    ):
        action = actions.add_parser(name, help=text, **help_parts(f"{text}\n\n  embershard publish {name} published\n"))
        action.add_argument("folder", type=Path, metavar="FOLDER", help="publish.folder of the run")
    return parser


def _paths(folder: Path) -> list[Path]:
    """Return the folders of all publications by number, a delta before the base of its state."""
    from embershard.distributed.publish.published import published

    found = [(seq, kind == "base", path) for kind in ("delta", "base") for seq, path in published(folder, kind)]
    if not found:
        raise ConfigError(f"{folder}: no publications there; give the publish.folder of a run that published some.")
    return [path for *_, path in sorted(found)]


def _ls(folder: Path) -> int:
    from embershard.distributed.publish.published import DamagedError, read_publication

    table = make_table(str(folder), ["name", "run", "state"], ["life", "step", "rows", "size"])
    for path in _paths(folder):
        try:
            found = read_publication(path)
        except DamagedError as error:
            table.add_row(path.name, "", str(error).partition(": ")[2], "", "", "", "")
            continue
        rows = f"{found.num_rows:,}" if found.kind == "delta" else ""
        made = "made of deltas" if found.state else "complete"
        table.add_row(
            found.name, found.run_id[:8], made, str(found.life), f"{found.step:,}", rows, size(found.num_bytes)
        )
    wide_console().print(table)
    return 0


def _verify(folder: Path) -> int:
    from embershard.distributed.publish.published import PublicationError, verify

    console, problems, have = wide_console(), 0, None
    for path in _paths(folder):
        try:
            found = verify(path)
            if found.kind == "delta" and have is not None and have.seq == found.seq - 1 and found.parent != have.link:
                raise PublicationError(f"{path}: it does not follow {have.name}")
        except PublicationError as error:
            problems, have = problems + 1, None
            say(console, f"INVALID  {error}")
            continue
        have = found
        say(console, f"valid    {path}: step {found.step:,}, {len(found.files)} files, {size(found.num_bytes)}")
    return 1 if problems else 0


def _base(folder: Path) -> int:
    from embershard.distributed.publish.compact import make_base
    from embershard.distributed.publish.published import PublicationError

    _paths(folder)
    try:
        base = make_base(folder)
    except PublicationError as error:
        raise CheckpointError(f"{error}. Nothing was written.") from error
    say(wide_console(), f"Wrote {folder / base.name}: step {base.step:,}, {size(base.num_bytes)}.")
    return 0
