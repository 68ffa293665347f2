"""The error of a model with rounded tables, beside the trained one, on samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from embershard.data import DataConfig, Target, open_source
from embershard.data.block import Block
from embershard.data.order.stream import SampleReader
from embershard.launch.export.serving_model import Model, Table, table_names
from embershard.launch.export.tables import KeptRows
from embershard.training.quality.metrics import Predicted, judge
from embershard.training.quality.quality import main_values

_BATCH = 1024


class RoundingSample:
    """Held-out samples, and the rows of the trained tables that they look up.

    Args:
        config: of the data; the first held-out samples are read.
        most_samples: to read.
        inputs: of the exported model.

    Attributes:
        kept: of each table, by its name, the rows to keep while the table is written.
    """

    def __init__(self, config: DataConfig, most_samples: int, inputs: dict[str, Any]) -> None:
        source = open_source(config, needs_labels=False)
        count = min(most_samples, source.chunks("eval").num_samples)
        self._blocks = list(SampleReader(source, "eval", config).blocks(count, _BATCH))
        self._schema, self._inputs = source.schema, inputs
        looked_up: dict[str, list[Tensor]] = {name: [] for name in table_names(inputs)}
        for lookup in inputs["lookups"]:
            feature = source.schema.keys.index(lookup["feature"])
            looked_up[lookup["table"]] += [torch.from_numpy(block.values[feature]) for block in self._blocks]
        self.kept = {name: KeptRows(torch.cat(ids).unique()) for name, ids in looked_up.items()}

    def error(self, model: nn.Module, layers: nn.Module) -> dict[str, Any]:
        """Return the error of the exported `model` on the samples, as JSON values.

        The distances of logits and of scores from the trained model's are the largest and the mean one; the AUCs, or
        RMSEs, are None where labels are missing or do not define them.

        Args:
            layers: of the trained model, around its tables.
        """
        trained = Model([_KeptTable(kept) for kept in self.kept.values()], layers, self._inputs)
        with torch.no_grad():
            pairs = [self._score(block, trained, model) for block in self._blocks]
        before, after, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        weights = [torch.from_numpy(block.weights) for block in self._blocks if block.weights is not None]
        of_samples = torch.cat(weights) if weights else None
        target = self._schema.target
        found: dict[str, Any] = {"samples": len(before), **_score_distances(target, before, after)}
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
        dense = batch.dense_features
        return trained(dense, ids, offsets), exported(dense, ids, offsets), batch.labels


def _score_distances(target: Target, before: Tensor, after: Tensor) -> dict[str, float]:
    scores = {"score": (before, after)}
    if target.task == "binary":
        scores = {"logit": (before, after), "score": (before.sigmoid(), after.sigmoid())}
    found: dict[str, float] = {}
    for name, (one, other) in scores.items():
        distance = (other - one).abs()
        found |= {f"{name}_max": float(distance.max()), f"{name}_mean": float(distance.mean())}
    return found


class _KeptTable(Table):
    """A trained table, of which some rows were kept."""

    def __init__(self, kept: KeptRows) -> None:
        super().__init__(kept.rows, "fp32")
        self._wanted = kept.wanted

    def rows(self, ids: Tensor) -> Tensor:
        return super().rows(torch.searchsorted(self._wanted, ids))
