"""What `embershard data inspect` and `convert` do with the columns of files of any form.

The first looks at them and writes the settings of a run on them; the second writes them as Parquet, with the columns of
other files joined to the rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from embershard.commands.data.suggest import (
    LabelSuggestion,
    Suggestion,
    day_of,
    distinct_values,
    num_bad_labels,
    others_of,
    suggest_features,
    suggest_label,
)
from embershard.data.block import BadRow, short
from embershard.data.config import TableConfig, TableFeature
from embershard.data.sources.input_file import files_at
from embershard.data.sources.table.cells import read_cells
from embershard.data.sources.table.raw import is_text, is_time
from embershard.data.sources.table.survey import FORMS, SECONDS_PER_DAY, ColumnSurvey, survey
from embershard.data.sources.table.whole_columns import WholeColumns, without_types
from embershard.errors import ConfigError, DataError, naming_file
from embershard.launch.arguments import check_new_output
from embershard.launch.screen import make_table, plain_console, say, wide_console
from embershard.settings.decoding import toml, toml_key
from embershard.whole_file import whole_file

_HELD_OUT, _MOST_BAD = 0.1, 0.9
_BATCHES_IN_FLIGHT = 3  # look_ahead.prefetch batches, and the one that trains
_LEAST_RATIO = 0.05  # the default of cache.ratio
_LEAST_BATCH, _MOST_BATCH, _STEPS_OF_AN_EPOCH = 16, 1024, 64
_MOST_LISTED = 10_000


def inspect(arguments: argparse.Namespace) -> int:
    """Run the action; return 0.

    Raises:
        DataError: a file cannot be read, or files have other columns than the first.
        ConfigError: no column looks like a label, and a file is to be written.
    """
    output: Path | None = arguments.output
    if output is not None:
        check_new_output(output)
    files = columns_of_files(arguments.data, arguments)
    columns, bad_lines = survey_files(files)
    num_bad = len(bad_lines)
    if unknown := [name for name in arguments.feature if name not in columns]:
        raise ConfigError(f"--feature: got {unknown[0]!r}; there are {', '.join(columns)}.")
    label = None
    if output is not None or arguments.label is not None:
        label = suggest_label(columns, arguments.label)
    suggested: list[Suggestion] = []
    taken = set() if label is None else {label.column}
    for name, column in columns.items():
        if label is None or name != label.column:
            suggested.append(suggest_features(column, taken, arguments.feature))
            taken.update(suggested[-1].features)
    _show(columns, num_bad)
    if output is not None and label is not None:
        used = [each for each in suggested if not each.may_be_result]
        if left_out := [each.column for each in suggested if each.may_be_result]:
            say(
                plain_console(),
                f"{', '.join(left_out)}: left out, since columns of 0 and 1 may be results, which are not known before "
                f"the label. To use one that is: --feature {left_out[0]}",
            )
        if not any(each["kind"] == "sparse" for suggestion in used for each in suggestion.features.values()):
            raise ConfigError(f"{arguments.data}: no column is a category, and a model needs one: text, or ids.")
        output.write_text(_settings(arguments.data, files[0], label, suggested, columns, num_bad), encoding="utf-8")
        say(plain_console(), f"Settings are in {output}. Check the label, then: embershard train --config {output}")
    return 0


def survey_files(files: list[WholeColumns]) -> tuple[dict[str, ColumnSurvey], list[str]]:
    """Return what the columns of all files hold, and the lines that are no rows, each as a sentence.

    Raises:
        DataError: a file cannot be read, or has other columns than the first; or no file has a row.
    """
    schema = files[0].schema()
    for file in files:
        if (other := file.schema()) != schema:
            raise DataError(
                f"{file.file.path} has the columns {', '.join(map(str, other))[:300]}; needed those of "
                f"{files[0].file.path}: {', '.join(map(str, schema))[:300]}"
            )
    bad: list[str] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for file in files:
            yield from file.batches(on_bad=partial(skip, file.file.path))

    def skip(path: Path, row: Any) -> str:
        bad.append(f"{path}:{row.number} has {row.actual_columns} columns; needed {row.expected_columns}")
        return "skip"

    columns = survey(schema, batches(), has_null_values=files[0].is_text)
    if not next(iter(columns.values())).rows:
        behind = "" if files[0].form.columns else " behind its header"
        raise DataError(f"{files[0].file.path}: no row{behind}; needed at least one")
    return columns, bad


def _show(columns: dict[str, ColumnSurvey], num_bad: int) -> None:
    first = next(iter(columns.values()))
    table = make_table(
        f"{first.rows:,} rows", ["column", "type"], ["distinct", "missing", "most", "least", "largest", "mean", "std"]
    )
    for name, column in columns.items():
        numbers = column.numbers
        shown = ["", "", "", ""]
        if numbers.count and not is_text(column.inner):
            shown = [f"{each:g}" for each in (numbers.least, numbers.largest, numbers.mean, numbers.std)]
        if numbers.count and is_time(column.inner):
            shown = [day_of(each) for each in (numbers.least, numbers.largest, numbers.mean)]
            shown.append(f"{numbers.std / SECONDS_PER_DAY:.1f} days")
        table.add_row(name, column.title, distinct_values(column), f"{column.missing:,}", f"{column.most:,}", *shown)
    wide_console().print(table)
    for name, column in columns.items():
        if others := others_of(column):
            say(plain_console(), f"{name}: {others}")
    if num_bad:
        say(plain_console(), f"{num_bad:,} lines have not as many cells as there are columns (data.bad_rows).")


def _settings(
    data: Path,
    form: WholeColumns,
    label: LabelSuggestion,
    suggested: list[Suggestion],
    columns: dict[str, ColumnSurvey],
    num_bad: int,
) -> str:
    num_rows, used = columns[label.column].rows, [each for each in suggested if not each.may_be_result]
    read = [columns[each.column] for each in used if each.features]
    num_bad += sum(each.num_bad for each in read) + num_bad_labels(columns[label.column])
    null_values = [*form.form.null_values]
    for column in (columns[label.column], *read):
        null_values += [word for word in column.null_cells if word not in null_values]
    lines = [
        f"# Written by embershard data inspect: {num_rows:,} rows. Check the label and the features. Then:",
        "#   embershard train --config FILE",
        "",
        "[data]",
        'kind = "table"',
        f"path = {toml(str(data.absolute()))}",
        f"eval_fraction = {_HELD_OUT:g}    # the last tenth of every file is held out",
        *([] if not num_bad else [_bad_rows(num_bad, num_rows)]),
        "",
        "[data.table]",
        f"label = {toml(label.column)}    # {label.why}",
    ]
    lines += _tasks(label)
    if form.is_text:
        lines.append(f"separator = {toml(form.form.separator)}")
        given = {"columns": form.form.columns, "null_values": tuple(null_values), "quoted": form.form.quoted}
        defaults = {"columns": (), "null_values": ("",), "quoted": True}
        lines += [f"{name} = {toml(value)}" for name, value in given.items() if value != defaults[name]]
    lines += ["", "[data.table.features]"]
    for suggestion in suggested:
        lines.append(f"# {' '.join(suggestion.column.split())}: {suggestion.why}")  # a name may have several lines
        sign = "# " if suggestion.may_be_result else ""
        lines += [f"{sign}{toml_key(name)} = {toml(settings)}" for name, settings in suggestion.features.items()]
    return "\n".join([*lines, *_of_the_model(used, num_rows)])


def _tasks(label: LabelSuggestion) -> list[str]:
    """Return the lines that say what is predicted of a label, and in comments what else could be."""
    if label.at_least is None:
        return []
    lines = [f"label_at_least = {label.at_least:g}    # labels are 1 from here on, else 0"]
    if label.mean is not None:
        said = "# predicts the number. To predict clicks, in place of these two lines:"
        lines = [f"label_mean = {label.mean:g}", f'task = "regression"    {said}', f"# {lines[0]}"]
    if label.classes:
        classes = f"# classes.{toml_key(label.column)} = {toml(list(label.classes))}"
        others = "label_at_least" if label.mean is None else "label_mean and task"
        lines += [f"# A probability for each number, in place of {others}:", '# task = "multiclass"', classes]
    return lines


def _bad_rows(num_bad: int, num_rows: int) -> str:
    """Return the setting that allows these bad rows, even if all of them are among those held out."""
    share = min(num_bad / (_HELD_OUT * max(num_rows, 1)), _MOST_BAD)
    digits = -floor(log10(share))
    allowed = min(ceil(share * 10**digits - 1e-9) / 10**digits, _MOST_BAD)
    return f"bad_rows = {allowed:g}    # up to {num_bad:,} of the rows are bad; all may be in the last tenth, held out"


def _of_the_model(suggested: list[Suggestion], num_rows: int) -> list[str]:
    batch = _LEAST_BATCH
    while batch < _MOST_BATCH and 2 * batch * _STEPS_OF_AN_EPOCH <= num_rows:
        batch *= 2
    features = [settings for each in suggested for settings in each.features.values()]
    table_rows = sum(TableFeature(**settings).table_rows for settings in features)
    in_flight = _BATCHES_IN_FLIGHT * batch * sum(each.lookups for each in suggested)
    ratio = min(1.0, max(_LEAST_RATIO, ceil(100 * in_flight / table_rows) / 100))
    return [
        "",
        "[model]",
        "embedding_dim = 16",
        "",
        "[cache]",
        f"ratio = {ratio:g}    # of {table_rows:,} rows, on the device; batches in flight need up to {in_flight:,}",
        "",
        "[embedding_optimizer]",
        'kind = "rowwise_adagrad"',
        "lr = 0.02",
        "",
        "[dense_optimizer]",
        'kind = "adam"',
        "lr = 0.001",
        "",
        "[train]",
        f"batch_size = {batch}    # per rank",
        "epochs = 1    # few samples want more: epochs = 10 and early_stopping = 3; the best epoch is kept",
        "",
    ]


def convert(arguments: argparse.Namespace) -> int:
    """Run the action; return 0.

    Raises:
        DataError: a file cannot be read, or cannot be joined.
        ConfigError: the output cannot be written.
    """
    output: Path = arguments.output
    check_new_output(output)
    files = columns_of_files(arguments.data, arguments)
    stops = arguments.bad_rows == "stop"
    types = _types_of(files, stops=stops)
    skipped = SkippedRows(output.with_name(output.name + ".bad_rows.jsonl"), 0 if stops else arguments.bad_rows)
    joined = [Joined.read(text, arguments) for text in arguments.join]
    num_rows, writer = 0, None
    with whole_file(output) as unfinished:
        for table in _groups(_joined_batches(files, types, joined, None if stops else skipped), arguments.rows):
            if writer is None:
                writer = pq.ParquetWriter(unfinished, table.schema, write_page_checksum=True)
            writer.write_table(table, row_group_size=arguments.rows)
            num_rows += table.num_rows
        skipped.finish()
        if writer is None:
            raise DataError(f"{arguments.data}: no row in it")
        writer.close()
    if skipped.num_bad:
        say(plain_console(), f"{skipped.num_bad:,} bad rows were left out; they are listed in {skipped.path}.")
    lacking = (f"{each.num_lacking:,} rows have no {each.key} in {each.path}." for each in joined if each.num_lacking)
    say(plain_console(), f"{num_rows:,} rows with {len(writer.schema)} columns are in {output}.", *lacking)
    say(plain_console(), f"Next: embershard data inspect {output} -o run.toml")
    return 0


class SkippedRows:
    """Reads the rows of text files, but for those that are none, or have a cell that is not of its column's type.

    Attributes:
        num_bad: rows left out; of all `num_rows`.
        path: the list, one JSON object to a line with the keys file, row, column and problem; made with the first.
    """

    def __init__(self, path: Path, allowed: float) -> None:
        self.path, self.num_bad, self.num_rows, self._allowed = path, 0, 0, allowed
        self._listed: list[BadRow] = []

    def batches(self, file: WholeColumns, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        """Yield the good rows of a file."""
        no_rows: list[int] = []

        def skip(row: Any) -> str:
            no_rows.append(row.number)
            self._add(file, row.number, "", f"has {row.actual_columns} columns; needed {row.expected_columns}")
            return "skip"

        first = 1 + (not file.form.columns)
        for batch in file.batches(on_bad=skip):
            cuts = np.asarray(no_rows, np.int64) - np.arange(len(no_rows))
            numbers = np.arange(first, first + len(batch))
            numbers += np.searchsorted(cuts, numbers, "right")
            is_good, columns = np.ones(len(batch), np.bool_), []
            for name, texts in zip(batch.schema.names, batch.columns, strict=True):
                form = FORMS.get(types[name])
                values, is_wrong = (texts, ~is_good & False) if form is None else read_cells(texts, [form])
                for row in np.flatnonzero(is_wrong & is_good).tolist():
                    problem = f"{name}={short(texts[row].as_py())}: needed {types[name]}, or nothing"
                    self._add(file, int(numbers[row]), name, problem)
                is_good &= ~is_wrong
                columns.append(values)
            first += len(batch)
            self.num_rows += len(batch)
            yield pa.RecordBatch.from_arrays(columns, names=batch.schema.names).filter(pa.array(is_good))
        self.num_rows += len(no_rows)

    def _add(self, file: WholeColumns, row: int, column: str, problem: str) -> None:
        self.num_bad += 1
        if len(self._listed) < _MOST_LISTED:
            self._listed.append(BadRow(file.file.path, row, column, problem))

    def finish(self) -> None:
        """Write the list.

        Raises:
            DataError: more rows are bad than the share that is allowed.
        """
        if not self._listed:
            return
        with naming_file(self.path), self.path.open("w", encoding="utf-8") as list_file:
            for row in self._listed:
                found = {"file": str(row.path), "row": row.row, "column": row.column, "problem": row.problem}
                list_file.write(f"{json.dumps(found)}\n")
        if self.num_bad > self._allowed * self.num_rows:
            raise DataError(
                f"{self.num_bad:,} of {self.num_rows:,} rows are bad, --bad-rows {self._allowed:g} allows "
                f"{self._allowed:.3%}: {self._listed[0]}. They are listed in {self.path}"
            )


@dataclass
class Joined:
    """A file whose columns are joined to rows by the values of one column.

    Attributes:
        path: of the file.
        table: its rows.
        key: the column in common; "" before the first rows came.
        num_lacking: rows without a partner.
    """

    path: Path
    table: pa.Table
    key: str = ""
    num_lacking: int = 0

    @staticmethod
    def read(text: str, arguments: argparse.Namespace) -> Joined:
        """Read the file of `--join FILE[:NAME,...]`."""
        path, colon, names = text.rpartition(":")
        if not colon or Path(text).exists():
            path, names = text, ""
        files = columns_of_files(Path(path), arguments, names or None, is_joined=True)
        types = _types_of(files)
        batches = [batch for file in files for batch in file.batches(types)]
        return Joined(Path(path), without_types(pa.Table.from_batches(batches)))

    def add_to(self, rows: pa.Table) -> pa.Table:
        """Return the rows with the columns of the file.

        Raises:
            DataError: there is not one column in common, or a value of it is in the file twice.
        """
        if not self.key:
            self._find_key(rows)
        there = self.table.column(self.key).combine_chunks()
        wanted = rows.column(self.key).combine_chunks()
        if there.type != wanted.type:
            there, wanted = there.cast("string"), wanted.cast("string")
        places = pc.index_in(wanted, value_set=there, skip_nulls=True)
        self.num_lacking += places.null_count
        for name in self.table.column_names:
            if name != self.key:
                rows = rows.append_column(self.table.schema.field(name), self.table.column(name).take(places))
        return rows

    def _find_key(self, rows: pa.Table) -> None:
        common = [name for name in rows.column_names if name in self.table.column_names]
        if len(common) != 1:
            found = f"has {', '.join(common)}" if common else "has none"
            raise DataError(
                f"{self.path}: to be joined it needs one column in common with the rows, and {found}: "
                f"{', '.join(self.table.column_names)} beside {', '.join(rows.column_names)}. Give other names: "
                f"--join {self.path}:NAME,..."
            )
        self.key = common[0]
        counts = pc.value_counts(self.table.column(self.key))
        most = pc.max(counts.field("counts")).as_py()
        if most is not None and most > 1:
            value = counts.field("values")[pc.index(counts.field("counts"), most).as_py()].as_py()
            raise DataError(f"{self.path}: {self.key}={value!r} is in {most} rows; needed each value once")


def _types_of(files: list[WholeColumns], *, stops: bool = True) -> dict[str, pa.DataType]:
    """Return the types of the columns of text files: integers, numbers or times where all cells are, or where bad rows
    do not stop, nearly all; else texts.

    Raises:
        DataError: a line has not as many cells as there are columns, and bad rows stop.
    """
    if not files[0].is_text:
        return {}
    columns, bad_lines = survey_files(files)
    if bad_lines and stops:
        share = ceil(1e4 * len(bad_lines) / next(iter(columns.values())).rows) / 1e4
        raise DataError(f"{bad_lines[0]}. To leave such lines out, and list them: --bad-rows {share:g}")
    is_text = {name for name, each in columns.items() if each.declared not in ("", "float")}
    exact = {name: each.exact if stops or each.null_cells else each.inner for name, each in columns.items()}
    return {name: pa.string() if name in is_text else kind for name, kind in exact.items()}


def _joined_batches(
    files: list[WholeColumns], types: dict[str, pa.DataType], joined: list[Joined], skipped: SkippedRows | None
) -> Iterator[pa.Table]:
    for file in files:
        for batch in file.batches(types) if skipped is None or not file.is_text else skipped.batches(file, types):
            table = without_types(pa.Table.from_batches([batch]))
            for other in joined:
                table = other.add_to(table)
            yield table


def _groups(tables: Iterator[pa.Table], num_rows: int) -> Iterator[pa.Table]:
    """Yield the same rows in tables of a multiple of `num_rows`; the last one may have others."""
    waiting: list[pa.Table] = []
    for table in tables:
        waiting.append(table)
        whole = sum(each.num_rows for each in waiting) // num_rows * num_rows
        if whole:
            rows = pa.concat_tables(waiting)
            yield rows.slice(0, whole)
            waiting = [rows.slice(whole)]
    rest = pa.concat_tables(waiting) if waiting else None
    if rest is not None and rest.num_rows:
        yield rest


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
