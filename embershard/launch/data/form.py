"""Arguments that say how text files are cut into columns, and the files that they apply to."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embershard.data.sources.table.whole_columns import WholeColumns


def add_form(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--columns", metavar="NAME,...", help="names of the columns of text files without a header")
    parser.add_argument(
        "--separator", metavar="CHAR", help="between the cells of a line (default: the first line shows it)"
    )
    parser.add_argument("--encoding", default="utf-8", help="of text files (default: %(default)s)")
    parser.add_argument(
        "--null", action="append", default=[], metavar="TEXT", help="a cell that is a missing value; may be repeated"
    )
    parser.add_argument("--no-quotes", action="store_true", help="quotes in text files are text")


def columns_of_files(
    path: Path, arguments: argparse.Namespace, names: str | None = None, *, is_joined: bool = False
) -> list[WholeColumns]:
    """Return the columns of the file, or of each data file in the folder, at `path`.

    Args:
        names: of the columns, in place of `--columns`.
        is_joined: neither `--columns` nor `--separator` is meant for it.

    Raises:
        DataError: there is no such file, or one is empty.
        ConfigError: an argument cannot be used.
    """
    from embershard.data.config import TableConfig
    from embershard.data.sources.input_file import files_at
    from embershard.data.sources.table.whole_columns import WholeColumns

    given = names if is_joined else arguments.columns
    separator = None if is_joined else arguments.separator
    separator = "\t" if separator == "\\t" else separator
    form = TableConfig(
        columns=() if given is None else tuple(name.strip() for name in given.split(",")),
        quoted=not arguments.no_quotes,
        null_values=("", *arguments.null),
    )
    found = files_at(str(path), form.files, "table")
    return [WholeColumns.at(file.path, form, arguments.encoding, separator) for file in found]
