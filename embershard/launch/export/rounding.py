"""The error of a model with rounded tables, beside the trained one, on samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from embershard.data import DataConfig, open_source
from embershard.data.block import Block
from embershard.data.reader import SampleReader
from embershard.launch.export.serving_model import Model, Table
from embershard.launch.export.tables import KeptRows
from embershard.models import table_name
from embershard.training.metrics import Predicted, judge
from embershard.training.quality import main_values

_BATCH = 1024


class RoundingSample:
    """Held-out samples, and the rows of the trained tables that they look up.

    Args:
        config: of the data; the first held-out samples are read.
        most_samples: to read.

    Attributes:
        kept: of each table by its name, the rows to keep while the table is written.
    """

    def __init__(self, config: DataConfig, most_samples: int) -> None:
        source = open_source(config, needs_labels=False)
        count = min(most_samples, source.chunks("eval").num_samples)
        self._blocks = list(SampleReader(source, "eval", config).blocks(count, _BATCH))
        self._schema = source.schema
        self._tables = [table_name(feature.table or feature.name) for feature in source.schema.sparse]
        ids: dict[str, list[Tensor]] = {}
        for block in self._blocks:
            for table, values in zip(self._tables, block.values, strict=True):
                ids.setdefault(table, []).append(torch.from_numpy(values))
        self.kept = {table: KeptRows(torch.cat(parts).unique()) for table, parts in ids.items()}

    def error(self, model: Model, layers: nn.Module) -> dict[str, Any]:
        """Return the error of the exported `model` on the samples, as JSON values.

        The distances of logits and of scores from the trained model's are the largest and the mean one; the AUCs, or
        RMSEs, are None where labels are missing or do not define them.

        Args:
            layers: of the trained model, behind its tables.
        """
        trained = Model([Table(self.kept[name].rows, "fp32") for name in self._tables], layers, model.inputs)
        with torch.no_grad():
            pairs = [self._score(block, trained, model) for block in self._blocks]
        before, after, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        weights = [block.weights for block in self._blocks if block.weights is not None]
        of_samples = torch.cat([*map(torch.from_numpy, weights)]) if weights else None
        target = self._schema.target
        found: dict[str, Any] = {"samples": len(before)}
        if target.task == "binary":
            found |= _distances("logit", before, after) | _distances("score", before.sigmoid(), after.sigmoid())
        else:
            found |= _distances("score", before, after)
        has_labels = not labels.isnan().any() and (of_samples is None or not of_samples.isnan().any())
        for what, outputs in (("trained", before), ("exported", after)):
            values = main_values(judge(target, Predicted(outputs, labels, of_samples)))
            found |= {f"{name}_{what}": value if has_labels else None for name, value in values.items()}
        return found

    def _score(self, block: Block, trained: nn.Module, exported: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        batch = block.to_batch(self._schema)
        bags = [batch.sparse_features[key] for key in self._schema.keys]
        offsets = [bag.offsets().long() for bag in bags]
        ids = [bag.values() for bag in bags]
        wanted = [self.kept[name].wanted for name in self._tables]
        kept = [torch.searchsorted(there, rows) for there, rows in zip(wanted, ids, strict=True)]
        dense = batch.dense_features
        return trained(dense, kept, offsets), exported(dense, ids, offsets), batch.labels


def _distances(what: str, before: Tensor, after: Tensor) -> dict[str, Any]:
    distance = (after - before).abs()
    return {f"{what}_max": float(distance.max()), f"{what}_mean": float(distance.mean())}
