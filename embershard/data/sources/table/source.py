"""The source of tables: text files with columns, and Parquet files; and a first look at such files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from embershard.data.block import BadRow, Block, Lengths, ParsedChunk
from embershard.data.config import CONSTANT, DataConfig, TableConfig, columns_of_files
from embershard.data.schema import Schema, SparseFeature
from embershard.data.sources.held_out import Share, alone, hold_out
from embershard.data.sources.input_file import InputFile, left_out_of, list_files
from embershard.data.sources.source import FileSource, Split, SplitChunks, in_threads
from embershard.data.sources.table.decode import ChunkDecoder, is_sound, labels_and_weights, readable
from embershard.data.sources.table.json_lines import json_form
from embershard.data.sources.table.parquet_files import ParquetFiles, are_parquet, first_rows, parquet_parts
from embershard.data.sources.table.plain_text import first_bytes
from embershard.data.sources.table.raw import RawChunk, TableFiles, is_list, need_columns
from embershard.data.sources.table.split import check_split, hold_out_by_column, in_windows
from embershard.data.sources.table.text_files import TextTables, are_json, columns_of, has_header
from embershard.data.sources.text import without_blank_lines
from embershard.errors import ConfigError, DataError

_FIRST_BYTES = 1 << 18
_FIRST_ROWS = 1000


class TableSource(FileSource):
    """Files of `data.kind = "table"`, see `TableConfig`; and of "parquet", see `ParquetConfig`.

    Args:
        needs_labels: False: the samples of a file without the column of labels have the label NaN.
        share: see `open_source`.
        newest: in time order, the newest window of files before.
    """

    def __init__(
        self, config: DataConfig, *, needs_labels: bool = True, share: Share = alone, newest: int | None = None
    ) -> None:
        schema, self._settings = self.schema_of(config), columns_of_files(config)
        self._most = self._settings.max_bag_size, f"data.{config.kind}.max_bag_size"
        self._num_workers = config.num_workers
        self._dense, self._sparse = self._settings.of_kind("dense"), self._settings.of_kind("sparse")
        (inputs, ends), self._left_out = list_files(config), left_out_of(config)
        self._files = _open(inputs, self._settings, config, needs_labels)
        self._has_bags = self._files.has_lists or any(each.separator is not None for each in self._sparse.values())
        chunk_rows, by_column = self._files.chunk_rows, partial(hold_out_by_column, config, self._files)
        if config.is_in_time_order:
            chunks = np.flatnonzero(np.less(ends, 1)[self._files.chunk_file])
            by_column = partial(in_windows, config, self._files, chunks, newest)
        held_out = hold_out(config, int(chunk_rows.sum()), share, by_column)
        split = SplitChunks(self._files.chunk_file, chunk_rows, ends, held_out)
        self._beyond: dict[int, dict[str, int]] = {}
        super().__init__(schema, split, num_kept=2 + config.num_workers, tolerates_bad_rows=config.bad_rows != "stop")

    @property
    def notes(self) -> tuple[str, ...]:
        return (*super().notes, *self._files.notes, *self._left_out)

    @staticmethod
    def schema_of(config: DataConfig) -> Schema:
        settings = columns_of_files(config)
        sparse, dense = settings.of_kind("sparse"), tuple(settings.of_kind("dense"))
        if config.kind == "table" and not dense:
            dense = (CONSTANT,)
        features = tuple(
            SparseFeature(name, feature.table_rows, feature.table, feature.pooling, feature.takes_ids)
            for name, feature in sparse.items()
        )
        return Schema(dense, features, settings.target)

    def beyond_tables(self) -> Counter[str]:
        """Return, by column, how many ids of the chunks that were read so far are beyond their table, whose mapping is
        "modulo": each shares its row with another id. Ids of the other split count, where a chunk has both."""
        found = Counter[str]()
        for counts in list(self._beyond.values()):
            found.update(counts)
        return found

    def held_out_columns(self, names: list[str]) -> Iterator[pa.Table]:
        return self.columns("eval", range(len(self.chunks("eval").rows)), names)

    def columns(self, split: Split, chunks: Iterable[int], names: list[str]) -> Iterator[pa.Table]:
        """Return columns of the samples as the files have them (of text files, texts), chunk after chunk. Bad rows are
        left out, as `read` does it in evaluation.

        Raises:
            DataError: a file has not one of the columns.
        """
        self._files.need(names)
        return (self._columns_of(split, chunk, names) for chunk in chunks)

    def _columns_of(self, split: Split, chunk: int, names: list[str]) -> pa.Table:
        physical, members = self._split.place(split, chunk)
        raw = self._files.read(physical, names)
        bad = self._parsed.get(physical).bad if self._most_bad is None else {}
        rows = np.setdiff1d(members, list(bad), assume_unique=True)
        table = raw.table.take(np.searchsorted(raw.places, rows))
        columns = {name: readable(column) for name, column in zip(names, table.columns, strict=True)}
        return pa.table(columns)

    def check(self) -> list[BadRow]:
        """Read all samples, and return the bad rows, where they are tolerated. Columns whose type leaves no bad cell
        are read, and not decoded.

        Raises:
            DataError: a chunk cannot be read; or a bad row is not tolerated, or cannot be replaced.
        """

        def bad_of(number: int) -> dict[int, BadRow]:
            return _bad_rows(self._files.read(number), self._settings, self._most)

        numbers, found = range(self.num_physical), list[BadRow]()
        for number, bad in zip(numbers, in_threads(bad_of, numbers, max(1, self._num_workers)), strict=True):
            if bad and self._most_bad is not None:
                raise bad[min(bad)].stops()
            if bad:
                self._split.need_replacements(number, bad)
                found += (bad[row] for row in sorted(bad))
        return found

    def parse(self, number: int, most_bad: int | None = None) -> ParsedChunk:
        chunk = self._files.read(number)
        decoder = ChunkDecoder(chunk, self._settings)
        num_rows = chunk.table.num_rows
        labels, weights = labels_and_weights(chunk, decoder, self._settings)
        dense = np.ones((num_rows, self.schema.num_dense), np.float32)
        for column, feature in zip(dense.T, self._dense.values(), strict=False):  # none: the constant
            column[:] = decoder.dense(feature)
        bags = [decoder.bags(feature, self._most) for feature in self._sparse.values()]
        if decoder.beyond:
            self._beyond[number] = decoder.beyond
        values, lengths = zip(*bags, strict=True)
        sizes: Lengths = np.stack(lengths) if self._has_bags else (1,) * len(values)
        block = Block(dense, labels, values, sizes, weights)
        if not decoder.is_sample.all():
            block = block.take(np.flatnonzero(decoder.is_sample))
        return ParsedChunk(block, dict(sorted(decoder.bad.items())))


def _open(files: list[InputFile], settings: TableConfig, config: DataConfig, needs_labels: bool) -> TableFiles:
    """Return the chunks of the files, which are all of one format.

    Raises:
        DataError: some are Parquet and some are text; or a file is damaged, or has not the columns.
    """
    if config.kind == "parquet" or are_parquet(files):
        return ParquetFiles(files, settings, needs_labels=needs_labels)
    return TextTables(files, settings, config.chunk_rows, config.num_workers, needs_labels=needs_labels)


def check_table(
    config: DataConfig,
    files: list[InputFile],
    of_metrics: Sequence[str] = (),
    kept: Sequence[str] = (),
    *,
    needs_labels: bool = True,
) -> None:
    """Check the columns of the files of "parquet" and "table": those that features need are there, with types and, in
    the first rows, values that fit.

    Args:
        of_metrics: columns of single values that evaluations need.
        kept, needs_labels: as for `check_data`.

    Raises:
        ConfigError: the features do not fit each other; or a file has not one of `of_metrics`.
        DataError: a file is empty or damaged, a column is missing or of another type, or a value does not fit.
    """
    settings = columns_of_files(config)
    TableSource.schema_of(config)
    if config.kind == "parquet" or are_parquet(files):
        for schema, _, part in parquet_parts(files, settings, needs_labels=needs_labels):
            kinds = {**dict.fromkeys(part.partitions, pa.string()), **{each.name: each.type for each in schema}}
            check_split(config, part.path, list(kinds), pa.schema(kinds.items()))
            _check_of_metrics(part.path, list(kinds), of_metrics)
            need_columns(part.path, list(kinds), kept)
            if lists := [name for name in of_metrics if is_list(kinds[name])]:
                raise ConfigError(
                    f"metrics.group, metrics.slices: {part.path}: column {lists[0]!r} is of type {kinds[lists[0]]}; "
                    "needed one value in each row. Choose another column."
                )
            if config.bad_rows == "stop":
                _check_values(first_rows(part, _FIRST_ROWS), settings, config.kind)
        return
    _check_texts(files, settings, config, of_metrics, kept, needs_labels)


def _check_of_metrics(path: Path, names: Sequence[str], of_metrics: Sequence[str]) -> None:
    try:
        need_columns(path, names, of_metrics)
    except DataError as error:
        raise ConfigError(f"metrics.group, metrics.slices: {error}") from None


def _check_texts(
    files: Sequence[InputFile],
    settings: TableConfig,
    config: DataConfig,
    of_metrics: Sequence[str],
    kept: Sequence[str],
    needs_labels: bool,
) -> None:
    """Raise `DataError` where a header or, where bad rows stop a run, one of the first lines does not fit."""
    is_json = are_json(files, settings)
    form = json_form(settings) if is_json else settings
    starts = [first_bytes(file, form, _FIRST_BYTES) for file in files]
    headers = [data.partition(b"\n")[0] for data in starts]
    parts, columns = columns_of(files, headers, settings, is_json=is_json, needs_labels=needs_labels)
    for part, of_lines, data in zip(parts, columns, starts, strict=True):
        has = [*part.names, *part.partitions]
        check_split(config, part.path, has)
        _check_of_metrics(part.path, has, of_metrics)
        need_columns(part.path, has, kept)
        is_header = not is_json and has_header(data.partition(b"\n")[0], form)
        lines = data.partition(b"\n")[2] if is_header else data
        whole = lines if len(data) < _FIRST_BYTES else lines[: lines.rfind(b"\n") + 1]
        rows, numbers = without_blank_lines(memoryview(whole))
        if config.bad_rows != "stop" or not len(numbers):
            continue
        try:
            table = of_lines.read(rows, len(numbers))
        except (pa.ArrowException, ValueError):
            continue  # training names the row
        first = 1 + is_header + form.skip_lines
        chunk = RawChunk(part.path, part.complete(table), np.arange(len(numbers)), first, lines=numbers + first)
        _check_values(chunk, settings, config.kind)


def _check_values(chunk: RawChunk, settings: TableConfig, kind: str) -> None:
    if bad := _bad_rows(chunk, settings, (settings.max_bag_size, f"data.{kind}.max_bag_size")):
        raise bad[min(bad)].stops()


def _bad_rows(chunk: RawChunk, settings: TableConfig, most: tuple[int, str]) -> dict[int, BadRow]:
    """Return the bad rows of a chunk, by their number in it: the same that `TableSource.parse` finds."""
    decoder = ChunkDecoder(chunk, settings)
    labels_and_weights(chunk, decoder, settings)
    features = [*settings.of_kind("dense").values(), *settings.of_kind("sparse").values()]
    for feature in features:
        if is_sound(chunk.table.column(str(feature.column)), feature):
            continue
        if feature.kind == "dense":
            decoder.dense(feature)
        else:
            decoder.bags(feature, most)
    return decoder.bad
