"""Chunks of columns as they are in a file, and the types of column that each feature may have."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa
from pyarrow import types

from embershard.data.config import TIME_ROWS, TableConfig, TableFeature
from embershard.data.hashing import Ids
from embershard.data.sources.input_file import InputFile
from embershard.errors import DataError

if TYPE_CHECKING:
    from embershard.data.block import BadRow


@dataclass(frozen=True)
class RawChunk:
    """Some rows of a file.

    Attributes:
        path: of the file.
        table: the columns that are needed, each in one piece. A file may have no column of labels.
        places: int64 [n], the number of each row in the chunk, from 0.
        first_row: number in the file of the chunk's row 0, from 1.
        bad: rows of the chunk that have no cells, by their number in it.
        lines: of a text file, the number in the file of each row of the chunk, from 1; None: they follow on each other.
    """

    path: Path
    table: pa.Table
    places: Ids
    first_row: int
    bad: dict[int, BadRow] = field(default_factory=dict)
    lines: Ids | None = None

    def row(self, place: int) -> int:
        """Return the number in the file of the chunk's row at a place."""
        return self.first_row + place if self.lines is None else int(self.lines[place])


class TableFiles(Protocol):
    """The files of a source, cut into C chunks that can be read in any order, by several threads.

    Attributes:
        chunk_file: int64 [C], each chunk's file.
        chunk_rows: int64 [C], its rows.
        has_lists: a column that is needed has lists.
        notes: what the user should know, as sentences.
    """

    chunk_file: Ids
    chunk_rows: Ids
    has_lists: bool
    notes: tuple[str, ...]

    def need(self, columns: list[str]) -> None:
        """Raise `DataError` where a file has not one of these columns."""

    def read(self, chunk: int, columns: list[str] | None = None) -> RawChunk:
        """Return a chunk.

        Args:
            columns: to read in place of those that features and labels need; every file has them.

        Raises:
            DataError: the file has changed, or is damaged.
        """


def needed_columns(settings: TableConfig) -> list[str]:
    """Return the names of the columns that the features read, each once."""
    names = [feature.column or name for name, feature in settings.features.items()]
    return list(dict.fromkeys(names))


@dataclass(frozen=True)
class PartColumns:
    """The columns of one of the files of a source. Files may differ: what one lacks is missing in its rows.

    Attributes:
        path: of the file.
        names: of its columns.
        partitions: columns that its folders name, with their one value.
        wanted: those that are needed. A file may have no column of labels.
    """

    path: Path
    names: list[str]
    partitions: dict[str, str | None]
    wanted: list[str]

    @staticmethod
    def of_files(
        files: Sequence[InputFile],
        names: Sequence[list[str]],
        settings: TableConfig,
        *,
        needs_labels: bool,
        may_lack: bool = False,
    ) -> list[PartColumns]:
        """Return the columns of files whose own columns are `names`.

        Args:
            may_lack: a column may be in no file, and is missing then; most are in each.

        Raises:
            DataError: a column is in no file; or labels, or most columns, are not in one; with the name that comes
                near.
        """
        features, judging, parts = needed_columns(settings), settings.judging_columns, []
        has_names = [[*own, *file.partitions] for file, own in zip(files, names, strict=True)]
        anywhere = list(dict.fromkeys(name for each in has_names for name in each))
        for file, own, has in zip(files, names, has_names, strict=True):
            is_other = 2 * sum(name in has for name in features) < len(features)
            if is_other or not may_lack:
                need_columns(file.path, has if is_other else anywhere, features)
            of_labels = [name for name in judging if needs_labels or name in has]
            need_columns(file.path, has, of_labels)
            parts.append(PartColumns(file.path, own, file.partitions, list(dict.fromkeys([*features, *of_labels]))))
        return parts

    @staticmethod
    def notes(parts: Sequence[PartColumns]) -> tuple[str, ...]:
        """Return sentences that say which columns are not in all files."""
        lacking = Counter(name for part in parts for name in part.wanted if not part.has(name))
        return tuple(
            f"{count} of {len(parts)} files have no column {name!r}: it is missing in their rows."
            for name, count in lacking.items()
        )

    def has(self, name: str) -> bool:
        return name in self.names or name in self.partitions

    def need(self, columns: list[str]) -> None:
        """Raise `DataError` where the file has not one of these columns."""
        need_columns(self.path, [*self.names, *self.partitions], columns)

    def own(self, columns: list[str] | None = None) -> list[str]:
        """Return those of `columns`, or of the wanted ones, that are in the file itself."""
        return [name for name in columns or self.wanted if name in self.names]

    def complete(self, table: pa.Table, columns: list[str] | None = None) -> pa.Table:
        """Return rows of the file with all of `columns`, or of the wanted ones; `table` has its own."""
        for name in columns or self.wanted:
            if name not in self.names:
                value = pa.scalar(self.partitions.get(name), pa.string())
                table = table.append_column(name, pa.repeat(value, table.num_rows))
        return table.select(columns or self.wanted)


def need_columns(path: Path, names: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise `DataError` where one of the columns `wanted` is not among a file's `names`; with the name that comes
    near."""
    for name in wanted:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has: {', '.join(names[:20])}"
            raise DataError(f"{path}: no column {name!r}; {hint}")


def check_types(path: Path, schema: pa.Schema, settings: TableConfig) -> None:
    """Raise `DataError` where a Parquet column that is there is not of a type that its feature can be read from."""
    for name in settings.judging_columns:
        kind = schema.field(name).type if name in schema.names else pa.int8()
        if not (_is_number(kind) or is_text(kind) or types.is_null(kind)):
            raise DataError(f"{path}: column {name!r} is of type {kind}; needed a number")
    for name, feature in settings.features.items():
        column = feature.column or name
        kind = schema.field(column).type if column in schema.names else pa.string()
        is_time_in_floats = types.is_floating(kind) and _is_of_times(feature) and column in settings.format
        if not (is_time_in_floats or _fits(feature, kind)):
            raise DataError(f"{path}: column {column!r} is of type {kind}; needed {_needed(feature)}")


def typed_name(name: str) -> tuple[str, str]:
    """Return a column's name and the type in it, as RecBole's atomic files write it: "" where there is none.

    >>> typed_name("tags:token_seq"), typed_name("tags")
    (('tags', 'token_seq'), ('tags', ''))
    """
    plain, _, kind = name.rpartition(":")
    return (plain, kind) if plain and kind in ("token", "float", "token_seq", "float_seq") else (name, "")


def named_once(names: Sequence[str]) -> list[str]:
    """Return the names of columns; a name that is there before gets a number, and one that is empty its place.

    >>> named_once(["", "score", "score", "score_2"])
    ['Unnamed: 0', 'score', 'score_3', 'score_2']
    """
    found, there = dict[str, None](), set(names)
    for place, given in enumerate(names):
        name = given or f"Unnamed: {place}"  # as pandas calls them
        new, number = name, 2
        while new in found or (new != given and new in there):
            new, number = f"{name}_{number}", number + 1
        found[new] = None
    return list(found)


def is_list(kind: pa.DataType) -> bool:
    """Return True for lists of any kind."""
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def is_text(kind: pa.DataType) -> bool:
    """Return True for texts, and for the cells of a text file, which are bytes."""
    if types.is_dictionary(kind):
        return is_text(kind.value_type)
    return types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)


def is_time(kind: pa.DataType) -> bool:
    """Return True for times and dates."""
    return types.is_timestamp(kind) or types.is_date(kind)


def _is_number(kind: pa.DataType) -> bool:
    is_plain = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return bool(is_plain or types.is_decimal(kind))


def _fits(feature: TableFeature, kind: pa.DataType) -> bool:
    if types.is_null(kind):
        return True  # writers give this type to a column that is missing in all rows
    if feature.kind == "dense" and feature.scale != "days":
        return _is_number(kind) or is_time(kind) or is_text(kind)
    if _is_of_times(feature):
        return is_time(kind) or types.is_integer(kind) or is_text(kind)
    inner = kind.value_type if is_list(kind) else kind
    if types.is_dictionary(inner):
        inner = inner.value_type
    if feature.mapping in ("text", "text_ids"):
        return is_text(inner) or (_is_number(inner) and not types.is_decimal(inner))
    return bool(types.is_integer(inner)) or is_text(inner)


def _is_of_times(feature: TableFeature) -> bool:
    return feature.mapping in TIME_ROWS or feature.scale == "days"


def _needed(feature: TableFeature) -> str:
    if _is_of_times(feature):
        return "a time, seconds since 1970, or text"
    if feature.kind == "dense":
        return "a number, or text that is one"
    return (
        "text or an integer, or a list of them"
        if feature.mapping in ("text", "text_ids")
        else "integers, texts that are, or lists of them"
    )
