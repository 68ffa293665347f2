"""A model of one's own, which `embershard train --config examples/own_model.toml` trains.

It has three collections of tables: two of bags, with different dims and poolings, and one of sequences. The function
knows no rank, no cache and no plan: those are settings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, PoolingType


class BagsAndSequences(nn.Module):
    """The ids of four features are read as sequences, with attention; those of the others are pooled, every second
    feature in rows of half the dim."""

    def __init__(self, schema: Any, hidden: int, dim: int) -> None:
        super().__init__()
        features, meta = list(schema.sparse), torch.device("meta")  # rows get their memory where they are placed
        self.read, pooled = features[2:6], features[:2] + features[6:]
        wide = [
            EmbeddingBagConfig(
                name=f"wide_{f.name}", num_embeddings=f.num_rows, embedding_dim=dim, feature_names=[f.name]
            )
            for f in pooled[::2]
        ]
        narrow = [
            EmbeddingBagConfig(
                name=f"narrow_{f.name}",
                num_embeddings=f.num_rows,
                embedding_dim=dim // 2,
                feature_names=[f.name],
                pooling=PoolingType.MEAN,
            )
            for f in pooled[1::2]
        ]
        sequences = [
            EmbeddingConfig(name=f"seq_{f.name}", num_embeddings=f.num_rows, embedding_dim=dim, feature_names=[f.name])
            for f in self.read
        ]
        self.wide = EmbeddingBagCollection(wide, device=meta)
        self.narrow = EmbeddingBagCollection(narrow, device=meta)
        self.sequences = EmbeddingCollection(sequences, device=meta)
        self.score = nn.Linear(dim, 1)
        width = len(schema.dense) + (len(wide) + len(self.read)) * dim + len(narrow) * (dim // 2)
        self.over = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, batch: Any) -> Tensor:
        """Return the logits [B, 1] of a batch: dense_features [B, num_dense], sparse_features, labels [B]."""
        wide = self.wide(batch.sparse_features).to_dict()  # each collection gets all sparse features, once
        narrow = self.narrow(batch.sparse_features).to_dict()
        found = self.sequences(batch.sparse_features)
        attended = []
        for feature in self.read:
            ids = found[feature.name]
            rows = ids.to_padded_dense(max(1, ids.lengths().max().item()))  # [B, L, dim]; torch.export knows item()
            attended.append((self.score(rows).softmax(dim=1) * rows).sum(dim=1))
        # By name: the order of the pooled embeddings depends on the plan.
        pooled = [each[name] for each in (wide, narrow) for name in sorted(each)]
        return self.over(torch.cat([batch.dense_features, *pooled, *attended], dim=1))


def build(schema: Any, options: dict[str, Any]) -> nn.Module:
    """Return the model for a schema's features, with the settings of `[model.options]`."""
    return BagsAndSequences(schema, hidden=options.get("hidden", 64), dim=options.get("dim", 16))
