"""The columns of the files that `embershard data inspect` and `convert` look at, whatever their form."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from embershard.data.block import BadRow, short
from embershard.data.config import DATA_FILES, TableConfig
from embershard.data.sources.input_file import InputFile, files_at
from embershard.data.sources.table.parquet_files import are_parquet
from embershard.data.sources.table.plain_text import first_bytes
from embershard.data.sources.table.survey import ColumnSurvey, survey
from embershard.data.sources.table.text_files import IF_BREAKS, are_json, header_names
from embershard.data.sources.table.text_forms import Given, is_value
from embershard.data.sources.table.whole_columns import WholeColumns, all_batches, common_schema
from embershard.errors import DataError

_FIRST_LINE_BYTES = 1 << 16


class Surveyed(NamedTuple):
    """What the columns of files hold.

    Attributes:
        files: as they are to be read; with line breaks in cells, where that reads more lines.
        columns: of all files, by name.
        bad: lines that are no rows.
    """

    files: list[WholeColumns]
    columns: dict[str, ColumnSurvey]
    bad: list[BadRow]


def survey_files(
    files: list[WholeColumns],
    wanted: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    *,
    only_types: bool = False,
) -> Surveyed:
    """Read all rows of files.

    Args:
        wanted, only_types: as for `survey`.

    Raises:
        DataError: a file cannot be read, or has other columns than the rest; or no file has a row.
    """
    bad: list[BadRow] = []
    batches = all_batches(files, on_bad=bad.append)
    how = {"has_null_values": files[0].is_text, "only_types": only_types}
    columns = survey(common_schema(files), batches, wanted=wanted, **how)
    if any(IF_BREAKS in each.problem for each in bad) and not files[0].form.line_breaks:
        folded = [replace(file, form=replace(file.form, line_breaks=True)) for file in files]
        again = survey_files(folded, wanted, only_types=only_types)
        if len(again.bad) < len(bad):
            return again
    if not next(iter(columns.values())).rows:
        if bad:
            raise DataError(f"{bad[0]}, and no line is good")
        behind = " behind its header" if files[0].is_text and not files[0].form.columns else ""
        raise DataError(f"{files[0].file.path}: no row{behind}; needed at least one")
    return Surveyed(files, columns, bad)


def patterns_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the patterns of the names of a folder's data files."""
    return tuple(arguments.files) or DATA_FILES


def columns_of_files(
    path: Path, arguments: argparse.Namespace, names: str | None = None, *, is_joined: bool = False
) -> list[WholeColumns]:
    """Return the columns of the file, or of each data file in the folder, at `path`.

    Args:
        names: of the columns, in place of `--columns`.
        is_joined: what is said of the lines of the first files is not meant for it.

    Raises:
        DataError: there is no such file, one is empty, or how a text file is written cannot be told.
        ConfigError: an argument cannot be used.
    """
    columns = names if is_joined else arguments.columns
    given = Given(
        columns=None if columns is None else tuple(name.strip() for name in columns.split(",")),
        encoding=arguments.encoding,
        quoted=False if arguments.no_quotes else None,
        line_breaks=arguments.line_breaks or None,
        null_values=("", *arguments.null),
    )
    if not is_joined:
        separator = "\t" if arguments.separator == "\\t" else arguments.separator
        has_header = True if arguments.header else None
        given = replace(given, separator=separator, skip_lines=arguments.skip_lines, has_header=has_header)
    found = files_at(str(path), patterns_of(arguments), "table")
    shown = _look(found, given)
    if not are_parquet(found):
        are_json(found, shown.form)
        found = [file for file in found if len(found) == 1 or first_bytes(file, shown.form, 1)]
    if shown.is_text and len(found) > 1:
        shown = replace(shown, form=_form_of_parts(found, shown))
    return [replace(shown, file=file) for file in found]


def _look(files: Sequence[InputFile], given: Given) -> WholeColumns:
    """Look at the largest file, since parts without rows show nothing; or where that has no header, at the first one:
    `split` leaves the header there."""
    largest = max(files, key=lambda file: file.num_bytes)
    try:
        return WholeColumns.at(largest.path, given)
    except DataError:
        if largest == files[0]:
            raise
        with suppress(DataError):
            return WholeColumns.at(files[0].path, given)
        raise


def _form_of_parts(files: Sequence[InputFile], shown: WholeColumns) -> TableConfig:
    """Return the form of text files that belong together: with names of columns, if some begin without a header.

    Raises:
        DataError: the first lines of two files do not fit each other.
    """
    form, names = shown.form, list(shown.form.columns)
    firsts = [first_bytes(file, form, _FIRST_LINE_BYTES).partition(b"\n")[0] for file in files]
    headers = [header_names(file.path, line, form) for file, line in zip(files, firsts, strict=True)]
    names = names or headers[[file.path for file in files].index(shown.file.path)]
    are_headers = [bool(set(header) & set(names)) for header in headers]
    for file, header, is_header in zip(files, headers, are_headers, strict=True):
        if len(header) == 1 < len(names):
            raise DataError(
                f"{file.path}: its first line is not cut by {form.separator!r}, as that of {shown.file.path}: "
                f"{short(header[0])}. Write each as Parquet, and give the folder of these: embershard data convert "
                f"{file.path} -o NEW.parquet"
            )
        if not is_header and not form.columns and (len(header) != len(names) or not any(map(is_value, header))):
            raise DataError(
                f"{file.path} has the columns {short(', '.join(header))}; needed those of {shown.file.path}: "
                f"{short(', '.join(names))}. Give one kind of files at a time: --files PATTERN"
            )
    if form.columns or all(are_headers):
        return form
    if other := next(
        (each for each, is_header in zip(headers, are_headers, strict=True) if is_header and each != names),
        None,
    ):
        raise DataError(
            f"{shown.file.path}: some parts begin without a header, and headers differ: {short(', '.join(other))} and "
            f"{short(', '.join(names))}. Give one kind of files at a time: --files PATTERN"
        )
    return replace(form, columns=tuple(names))
