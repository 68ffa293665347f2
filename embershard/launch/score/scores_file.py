"""The file of scores: Parquet, written as the scores come."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from embershard.data import Target
from embershard.errors import naming_file
from embershard.training.quality.metrics import Predicted

#: Scores of a row group.
_GROUP_ROWS = 1 << 17


class ScoresFile:
    """Columns `logit` and `score` (the probability), both float32, and `label`, float32, where the first samples have
    labels. With task "regression" there is no `logit`, and `score` is the predicted number; of several labels, names
    are as `score/click`. The file gets its name when it is complete.

    >>> file = ScoresFile(Path("scores.parquet"), Target())
    >>> file.add(Predicted(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 0.0])))
    >>> file.finish()
    >>> pq.read_table("scores.parquet").column_names
    ['logit', 'score', 'label']
    """

    def __init__(self, path: Path, target: Target) -> None:
        self._path, self._partial = path, path.with_name(path.name + ".partial")
        self._target = target
        self._waiting: list[Predicted] = []
        self._num_waiting = 0
        self._writer: pq.ParquetWriter | None = None

    def add(self, predicted: Predicted) -> None:
        """Add what the model says of the next samples; a label NaN is none."""
        self._waiting.append(predicted)
        self._num_waiting += len(predicted.labels)
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
        columns = self._columns()
        if self._writer is not None:
            columns = {name: columns[name] for name in self._writer.schema.names}
        else:
            is_empty = {name for name, values in columns.items() if name.startswith("label") and values.isnan().all()}
            columns = {name: values for name, values in columns.items() if name not in is_empty}
        table = pa.table({name: pa.array(values.numpy(), pa.float32()) for name, values in columns.items()})
        with naming_file(self._partial):
            if self._writer is None:
                self._writer = pq.ParquetWriter(self._partial, table.schema, write_page_checksum=True)
            self._writer.write_table(table)
        self._waiting, self._num_waiting = [], 0

    def _columns(self) -> dict[str, torch.Tensor]:
        """Return the columns of the samples that wait, by name."""
        names = self._target.labels
        found: dict[str, torch.Tensor] = {}
        outputs = torch.cat([each.outputs for each in self._waiting]).reshape(-1, len(names))
        labels = torch.cat([each.labels for each in self._waiting]).reshape(-1, len(names))
        for name, output, label in zip(names, outputs.T, labels.T, strict=True):
            of = "" if len(names) == 1 else f"/{name}"
            if self._target.task == "binary":
                found[f"logit{of}"] = output
            found[f"score{of}"] = torch.sigmoid(output) if self._target.task == "binary" else output
            found[f"label{of}"] = label
        return found
