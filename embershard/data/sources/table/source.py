"""The source of tables: text files with columns, and Parquet files."""

from __future__ import annotations

import numpy as np

from embershard.data.bad_rows import ParsedChunk
from embershard.data.block import Block, Lengths
from embershard.data.config import DataConfig
from embershard.data.schema import Schema
from embershard.data.sources.input_file import InputFile
from embershard.data.sources.source import FileSource, SplitChunks, list_files
from embershard.data.sources.table.config import TableConfig, settings_of, table_schema
from embershard.data.sources.table.decode import ChunkDecoder
from embershard.data.sources.table.parquet_files import ParquetFiles, are_parquet
from embershard.data.sources.table.raw import TableFiles
from embershard.data.sources.table.targets import labels_and_weights
from embershard.data.sources.table.text_files import TextTables


class TableSource(FileSource):
    """Files of `data.kind = "table"`, see `TableConfig`; and of "parquet", see `ParquetConfig`.

    Args:
        needs_labels: False: the samples of a file without the column of labels have the label NaN.
    """

    def __init__(self, config: DataConfig, *, needs_labels: bool = True) -> None:
        schema, self._settings = self.schema_of(config), settings_of(config)
        self._most = self._settings.max_bag_size, f"data.{config.kind}.max_bag_size"
        self._dense, self._sparse = self._settings.of_kind("dense"), self._settings.of_kind("sparse")
        inputs, held_out = list_files(config, self._settings.files)
        self._files = _open(inputs, self._settings, config, needs_labels)
        self._has_bags = self._files.has_lists or any(each.separator is not None for each in self._sparse.values())
        split = SplitChunks(self._files.chunk_file, self._files.chunk_rows, held_out)
        super().__init__(schema, split, num_kept=2 + config.num_workers, tolerates_bad_rows=config.bad_rows != "stop")

    @property
    def notes(self) -> tuple[str, ...]:
        return self._files.notes

    @staticmethod
    def schema_of(config: DataConfig) -> Schema:
        return table_schema(config)

    def parse(self, number: int, most_bad: int | None = None) -> ParsedChunk:
        chunk = self._files.read(number, most_bad)
        decoder = ChunkDecoder(chunk)
        num_rows = chunk.table.num_rows
        labels, weights = labels_and_weights(chunk, decoder, self._settings)
        dense = np.ones((num_rows, self.schema.num_dense), np.float32)
        for column, feature in zip(dense.T, self._dense.values(), strict=False):  # none: the constant
            column[:] = decoder.dense(feature)
        bags = [decoder.bags(feature, self._most) for feature in self._sparse.values()]
        values, lengths = zip(*bags, strict=True)
        sizes: Lengths = np.stack(lengths) if self._has_bags else (1,) * len(values)
        block = Block(dense, labels, values, sizes, weights)
        if not decoder.bad:
            return ParsedChunk(block)
        bad = dict(sorted(decoder.bad.items()))
        is_good = ~np.isin(chunk.places, np.fromiter(bad, np.int64))
        return ParsedChunk(block.take(np.flatnonzero(is_good)), bad)


def _open(files: list[InputFile], settings: TableConfig, config: DataConfig, needs_labels: bool) -> TableFiles:
    """Return the chunks of the files, which are all of one format.

    Raises:
        DataError: some are Parquet and some are text; or a file is damaged, or has not the columns.
    """
    if config.kind == "parquet" or are_parquet(files):
        return ParquetFiles(files, settings, needs_labels=needs_labels)
    return TextTables(files, settings, config.chunk_rows, config.num_workers, needs_labels=needs_labels)
