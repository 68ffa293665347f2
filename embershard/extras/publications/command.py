"""`embershard publish`: lists and verifies publications, and makes a base of deltas."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from embershard.errors import CheckpointError, ConfigError
from embershard.launch.arguments import help_parts, make_parser
from embershard.launch.screen import make_table, say, wide_console
from embershard.units import size

if TYPE_CHECKING:  # it loads torch, and --help must answer at once
    from torch import Tensor

    from embershard.distributed.publish.published import Publication

_Ids = dict[str, "tuple[Tensor, Tensor]"]
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

    console, problems, have, ids = wide_console(), 0, None, _Ids()
    for path in _paths(folder):
        try:
            found = verify(path)
            if found.kind == "delta" and have is not None and have.seq == found.seq - 1 and found.parent != have.link:
                raise PublicationError(f"{path}: it does not follow {have.name}")
            ids = _ids_behind(path, found, have, ids)
        except PublicationError as error:
            problems, have, ids = problems + 1, None, {}
            say(console, f"INVALID  {error}")
            continue
        have = found
        say(console, f"valid    {path}: step {found.step:,}, {len(found.files)} files, {size(found.num_bytes)}")
    return 1 if problems else 0


def _ids_behind(path: Path, found: Publication, have: Publication | None, ids: _Ids) -> _Ids:
    """Return the ids of tables in a state, and their rows; none where the one before it is not known.

    Args:
        have, ids: the state before.
    """
    import torch

    from embershard.distributed.publish.published import PublicationError, ids_behind, ids_of_base, read_files

    if found.kind == "base":
        own = ids_of_base(path)
        is_known = bool(ids) and have is not None and have.seq == found.seq
        is_same = own.keys() == ids.keys() and all(
            torch.equal(*pair) for name in ids for pair in zip(ids[name], own[name], strict=True)
        )
        if is_known and not is_same:
            raise PublicationError(f"{path}: its ids are not those of delta_{found.seq}")
        return own
    is_next = bool(ids) and have is not None and have.seq == found.seq - 1
    return ids_behind(ids, path, found, read_files(path, found)) if is_next else {}


def _base(folder: Path) -> int:
    from embershard.distributed.publish.published import PublicationError
    from embershard.extras.publications.compact import make_base

    _paths(folder)
    try:
        base = make_base(folder)
    except PublicationError as error:
        raise CheckpointError(f"{error}. Nothing was written.") from error
    say(wide_console(), f"Wrote {folder / base.name}: step {base.step:,}, {size(base.num_bytes)}.")
    return 0
