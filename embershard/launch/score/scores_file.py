"""The file of scores: Parquet, written as the scores come."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from embershard.errors import naming_file

#: Scores of a row group.
_GROUP_ROWS = 1 << 17


class ScoresFile:
    """Columns `logit` and `score` (the probability), both float32, and `label`, float32, where the first samples have
    labels. The file gets its name when it is complete.

    >>> file = ScoresFile(Path("scores.parquet"))
    >>> file.add(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 0.0]))
    >>> file.finish()
    >>> pq.read_table("scores.parquet").column_names
    ['logit', 'score', 'label']
    """

    def __init__(self, path: Path) -> None:
        self._path, self._partial = path, path.with_name(path.name + ".partial")
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._num_waiting = 0
        self._writer: pq.ParquetWriter | None = None

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add logits [n] and labels [n] of the next samples; NaN is no label."""
        self._waiting.append((logits, labels))
        self._num_waiting += len(logits)
        if self._num_waiting >= _GROUP_ROWS:
            self._write()

    def finish(self) -> None:
        """Write the rest, and give the file its name."""
        self._write()
        with naming_file(self._path):
            if self._writer is not None:
                self._writer.close()
            self._partial.rename(self._path)

    def close(self) -> None:
        """Remove an unfinished file; of a finished one, nothing."""
        if self._writer is not None:
            self._writer.close()
        self._partial.unlink(missing_ok=True)

    def _write(self) -> None:
        logits, labels = (torch.cat(parts) for parts in zip(*self._waiting, strict=True))
        columns = {"logit": logits.numpy(), "score": torch.sigmoid(logits).numpy(), "label": labels.numpy()}
        has_labels = not labels.isnan().all() if self._writer is None else "label" in self._writer.schema.names
        if not has_labels:
            del columns["label"]
        table = pa.table({name: pa.array(values, pa.float32()) for name, values in columns.items()})
        with naming_file(self._partial):
            if self._writer is None:
                self._writer = pq.ParquetWriter(self._partial, table.schema, write_page_checksum=True)
            self._writer.write_table(table)
        self._waiting, self._num_waiting = [], 0
