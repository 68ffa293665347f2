"""Files with a JSON object in each line."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as arrow_json
from pyarrow import types

from embershard.data.block import short
from embershard.data.config import TableConfig
from embershard.data.hashing import Ids
from embershard.data.sources.input_file import InputFile
from embershard.data.sources.table.containers import command_over, refuse_python
from embershard.data.sources.table.plain_text import first_bytes, plain_blocks
from embershard.data.sources.table.raw import is_list, is_text, is_time
from embershard.data.sources.text import parse_lines
from embershard.errors import DataError

_HEAD_BYTES = 1 << 22  # that show keys, and what they hold
_FIRST_BYTES = 1 << 8
#: Kinds of values that one column may have, side by side: as texts.
_SCALARS = frozenset({"text", "number", "bool"})
#: A number, or a bool, that is the value of a key; what stands before it as a text: a letter that no text has.
_SCALAR = re.compile(rb'(?<!\\)("\s*:\s*)(-?[0-9][-+.0-9eE]*|true|false)(?=\s*[,}])')
_MARK = "\ue0ff"


def json_form(settings: TableConfig) -> TableConfig:
    """Return the settings with none of CSV."""
    return replace(settings, separator=",", columns=(), escape="", line_breaks=False, skip_lines=0)


def has_json_lines(file: InputFile, settings: TableConfig) -> bool | None:
    """Return whether a text file has JSON objects; None: it has nothing.

    Raises:
        DataError: it is one JSON list.
    """
    first = first_bytes(file, json_form(settings), _FIRST_BYTES).lstrip()
    if first.startswith(b"[") and ".json" in file.path.name:
        made = command_over(file, "jq -c '.[]'", "NEW.jsonl")
        raise DataError(f"{file.path}: is one JSON list; needed an object to a line: {made}")
    return first.startswith(b"{") if first else None


@dataclass(frozen=True)
class JsonColumns:
    """How the lines of a file become columns. The keys of an object within an object are columns, too, called as
    `user.id`.

    Attributes:
        schema: the columns that the first lines have, with their types. Later numbers may be of another type.
        names: of the columns.
        to_read: those that are needed; one that a line has not is missing.
    """

    schema: pa.Schema
    names: list[str]
    to_read: list[str]

    @staticmethod
    def of(file: InputFile, settings: TableConfig, wanted: Collection[str] = (), *, whole: bool = False) -> JsonColumns:
        """Return the columns of a file, by its first lines; `wanted` ones may come later. `whole`: by all lines. Of a
        compressed file that has nothing, the `wanted` ones.

        Raises:
            DataError: the file is damaged, or its first line is no object.
        """
        form, schema = json_form(settings), pa.schema([])
        for block in plain_blocks(file, form) if whole else [first_bytes(file, form, _HEAD_BYTES)]:
            lines = block[: block.rfind(b"\n") + 1] or block
            found, _ = parse_lines(memoryview(lines), _parse)
            if block and not found and not len(schema):
                first = block.partition(b"\n")[0].decode("utf-8", "replace")
                refuse_python(file, first)
                made = command_over(file, "jq -c .", "NEW.jsonl")
                raise DataError(f"{file.path}:1 is no JSON object: {short(first)}; needed one to a line: {made}")
            for _, table in found:
                schema = _unified(schema, table.schema)
        names = list(schema.names) or list(wanted)
        if late := [name for name in wanted if name not in names]:
            names += _with_keys(plain_blocks(file, form), late)
        return JsonColumns(schema, names, names)

    def read(self, lines: memoryview, num_lines: int) -> pa.Table:
        """Return the needed columns of whole lines, each in one piece.

        Raises:
            ValueError: a line is no object, or has a value of another type than the first lines.
        """
        texts = [field for field in self.schema if is_text(field.type) and "." not in field.name]
        table = _parse(lines, num_lines, pa.schema([(field.name, pa.string()) for field in texts]))
        for name in self.schema.names:
            kind = self.schema.field(name).type
            found = _kind(table.schema.field(name).type) if name in table.column_names else "nothing"
            if found not in (_kind(kind), "nothing") and not {found, _kind(kind)} <= _SCALARS:
                raise ValueError(f"{name} is of another type")
        for name in self.to_read:
            if name not in table.column_names:
                table = table.append_column(name, pa.nulls(len(table), self._type_of(name)))
        return table.select(self.to_read).combine_chunks()

    def _type_of(self, name: str) -> pa.DataType:
        kind = self.schema.field(name).type if name in self.schema.names else pa.string()
        return pa.string() if types.is_null(kind) else kind

    def read_good(self, data: memoryview) -> tuple[pa.Table, Ids, dict[int, bytes]]:
        """Return the needed columns of the lines that are rows; their numbers [n]; and the other lines by number."""
        found, failed = parse_lines(data, self.read)
        if not found:
            empty = pa.table({name: pa.nulls(0, self._type_of(name)) for name in self.to_read})
            return empty, np.zeros(0, np.int64), {line: text for line, (text, _) in failed.items()}
        rows = np.concatenate([lines for lines, _ in found])
        schema = reduce(_unified, (part.schema for _, part in found))
        table = pa.concat_tables([part.cast(schema) for _, part in found])
        if len(found) > 1:
            table, rows = table.take(np.argsort(rows)), np.sort(rows)
        return table.combine_chunks(), rows, {line: text for line, (text, _) in failed.items()}

    def explain(self, line: bytes) -> str:
        """Say what is wrong with a line."""
        text = line.decode("utf-8", "backslashreplace").strip()
        try:
            found = json.loads(line)
        except ValueError as error:
            return f"{short(text)}: is no JSON object ({error})"
        if not isinstance(found, dict):
            return f"{short(text)}: needed a JSON object, with the columns as keys"
        for name, value in _flat(found):
            kind = "nothing" if name not in self.schema.names else _kind(self.schema.field(name).type)
            is_fit = kind in ("nothing", _kind_of(value)) or {_kind_of(value), kind} <= _SCALARS
            if value is not None and not is_fit:
                return f"{name}={short(str(value))}: needed a {kind}, as in the first lines"
        return f"{short(text)}: has a key twice, or values of several types in a list"


def _parse(lines: memoryview, num_lines: int, texts: pa.Schema | None = None) -> pa.Table:
    """Return all columns of lines, those in objects with the names of both."""
    data = bytes(lines)
    if not data.strip():
        raise ValueError("an empty line is no object")
    try:
        table = _read_json(data, texts)
    except pa.ArrowInvalid as error:
        if "changed from" not in str(error):
            raise
        table = _with_numbers(_read_json(_SCALAR.sub(rb'\1"' + _MARK.encode() + rb'\2"', data), texts))
    if table.num_rows != num_lines:
        raise ValueError("a line is no object")
    if texts is None:  # times in text are texts, as in CSV
        fields = [pa.field(each.name, pa.string()) if is_time(each.type) else each for each in table.schema]
        return pa.table([pa.nulls(num_lines, each.type) for each in fields], schema=pa.schema(fields))
    return table


def _read_json(data: bytes, texts: pa.Schema | None) -> pa.Table:
    table = arrow_json.read_json(
        pa.py_buffer(data),
        arrow_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        arrow_json.ParseOptions(explicit_schema=texts),
    )
    while any(types.is_struct(field.type) for field in table.schema):
        table = table.flatten()
    return table


def _with_numbers(table: pa.Table) -> pa.Table:
    """Return columns whose numbers and bools are texts behind `_MARK`: as such again where no value is a text, else as
    texts."""
    for place, name in enumerate(table.column_names):
        column = table.column(place).combine_chunks()
        if not types.is_string(column.type) or not (num_marked := pc.sum(pc.starts_with(column, _MARK)).as_py()):
            continue
        column = pc.replace_substring_regex(column, f"^{_MARK}", "")
        for kind in (pa.int64(), pa.float64(), pa.bool_()) if num_marked == len(column) - column.null_count else ():
            with suppress(pa.ArrowInvalid):
                column = column.cast(kind)
                break
        table = table.set_column(place, name, column)
    return table


def _unified(first: pa.Schema, second: pa.Schema) -> pa.Schema:
    """Return the columns of both; of one that has values of two types, texts, or where one is a list the first."""
    for field in second:
        place = first.get_field_index(field.name)
        if place < 0:
            first = first.append(field)
            continue
        try:
            both = pa.unify_schemas([pa.schema([first.field(place)]), pa.schema([field])], promote_options="permissive")
            first = first.set(place, both.field(0))
        except pa.ArrowException:
            if {_kind(first.field(place).type), _kind(field.type)} <= _SCALARS:
                first = first.set(place, pa.field(field.name, pa.string()))
    return first


def _with_keys(blocks: Iterator[bytes], names: Sequence[str]) -> list[str]:
    """Return those of the names whose keys are in the text, which is read until all of them were seen."""
    left = {name: json.dumps(name.rpartition(".")[2], ensure_ascii=False).encode() for name in names}
    for block in blocks:
        left = {name: key for name, key in left.items() if key not in block}
        if not left:
            break
    return [name for name in names if name not in left]


def _flat(found: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in found.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", each) for inner, each in _flat(value))
        else:
            yield name, value


def _kind(kind: pa.DataType) -> str:
    if types.is_null(kind):
        return "nothing"
    if is_list(kind):
        return "list"
    if types.is_boolean(kind):
        return "bool"
    return "text" if is_text(kind) or is_time(kind) else "number"


def _kind_of(value: object) -> str:
    kinds = {bool: "bool", str: "text", list: "list"}
    return next((kind for each, kind in kinds.items() if isinstance(value, each)), "number")
