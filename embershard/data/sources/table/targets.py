"""Labels and weights of the samples of a chunk."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from embershard.data.schema import Task
from embershard.data.sources.table.config import TableConfig
from embershard.data.sources.table.decode import ChunkDecoder
from embershard.data.sources.table.raw import RawChunk

_NEEDED_LABEL = (
    'a label must be 0 or 1; data.kind = "table" takes other numbers, by label_at_least or task = "regression"'
)
Numbers = NDArray[np.float32]


def labels_and_weights(chunk: RawChunk, decoder: ChunkDecoder, settings: TableConfig) -> tuple[Numbers, Numbers | None]:
    """Return the labels [n], or [n, T] of several, and the weights [n] of a chunk's samples.

    They are NaN where a file has not their column; there are no weights where the settings have none.
    """
    there = chunk.table.column_names
    missing = np.full(chunk.table.num_rows, np.nan, np.float32)
    pairs = zip(settings.labels, settings.thresholds(), strict=True)
    columns = [_label(decoder, name, settings.task, least) if name in there else missing for name, least in pairs]
    labels = columns[0] if len(columns) == 1 else np.stack(columns, axis=1)
    if settings.weight is None:
        return labels, None
    return labels, _weights(decoder, settings.weight) if settings.weight in there else missing


def _label(decoder: ChunkDecoder, name: str, task: Task, least: float | None) -> Numbers:
    numbers = decoder.numbers(name)
    if task == "binary" and least is None:
        decoder.note(~np.isin(numbers, (0, 1)), name, numbers, _NEEDED_LABEL)
        return numbers.astype(np.float32)
    decoder.note(np.isnan(numbers), name, numbers, "a label must be a number")
    return numbers.astype(np.float32) if least is None else (numbers >= least).astype(np.float32)


def _weights(decoder: ChunkDecoder, name: str) -> Numbers:
    numbers = decoder.numbers(name)
    decoder.note(~(numbers >= 0), name, numbers, "a weight must be a number of at least 0")
    return numbers.astype(np.float32)
