"""Text files with columns as chunks of lines."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from embershard.data.bad_rows import BadRow
from embershard.data.sources.input_file import InputFile
from embershard.data.sources.lines import parse_lines
from embershard.data.sources.table.config import TableConfig
from embershard.data.sources.table.raw import RawChunk
from embershard.data.sources.table.text_columns import columns_of
from embershard.data.sources.text import TextFiles


class TextTables:
    """Chunks of lines of text files; see `TableFiles`."""

    def __init__(
        self, files: list[InputFile], settings: TableConfig, chunk_rows: int, num_workers: int, *, needs_labels: bool
    ) -> None:
        self._text = TextFiles(files, chunk_rows, num_workers, has_header=not settings.columns)
        self._columns = [
            columns_of(file.path, header, settings, needs_labels=needs_labels)
            for file, header in zip(files, self._text.headers, strict=True)
        ]
        self.chunk_file, self.chunk_rows = self._text.file, self._text.rows
        self.has_lists = False
        self.notes: tuple[str, ...] = ()

    def read(self, chunk: int, most_bad: int | None) -> RawChunk:
        columns, path = self._columns[self._text.file[chunk]], self._text.path(chunk)
        first_row = int(self._text.first_row[chunk]) + 1
        tables, failed = parse_lines(self._text.read(chunk), columns.read, most_bad)
        bad = {line: BadRow(path, first_row + line, "", columns.explain(text)) for line, (text, _) in failed.items()}
        if not tables:
            tables = [columns.read(memoryview(b""), 0)]
        num_rows = sum(table.num_rows for table in tables)
        places = np.setdiff1d(np.arange(num_rows + len(bad)), list(bad))
        return RawChunk(path, pa.concat_tables(tables).combine_chunks(), places, first_row, bad)
