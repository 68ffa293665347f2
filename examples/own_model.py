"""A model of one's own, which `embershard train --config examples/own_model.toml` trains.

It has three collections of tables: two of bags, with different dims and poolings, and one of sequences. The function
knows no rank, no cache and no plan: those are settings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, PoolingType

META = torch.device("meta")  # the rows get their memory where they are placed
NUM_SEQUENCES = 4


class BagsAndSequences(nn.Module):
    """A bag per feature, rare features in wider rows; and attention within the sequences of the last features."""

    def __init__(self, schema: Any, hidden: int, dim: int) -> None:
        super().__init__()
        *bags, third, second, first, last = schema.sparse
        bags.sort(key=lambda feature: feature.num_rows)
        half = len(bags) // 2
        small = [
            EmbeddingBagConfig(
                name=f"small_{f.name}",
                num_embeddings=f.num_rows,
                embedding_dim=dim // 2,
                feature_names=[f.name],
                pooling=PoolingType.MEAN,
            )
            for f in bags[:half]
        ]
        large = [
            EmbeddingBagConfig(
                name=f"large_{f.name}", num_embeddings=f.num_rows, embedding_dim=dim, feature_names=[f.name]
            )
            for f in bags[half:]
        ]
        self.names = [f.name for f in (third, second, first, last)]
        sequences = [
            EmbeddingConfig(name=f"seq_{f.name}", num_embeddings=f.num_rows, embedding_dim=dim, feature_names=[f.name])
            for f in (third, second, first, last)
        ]
        self.small = EmbeddingBagCollection(small, device=META)
        self.large = EmbeddingBagCollection(large, device=META)
        self.sequences = EmbeddingCollection(sequences, device=META)
        self.score = nn.Linear(dim, 1)
        width = len(schema.dense) + len(small) * (dim // 2) + (len(large) + NUM_SEQUENCES) * dim
        self.over = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, batch: Any) -> Tensor:
        """Return the logits [B, 1] of a batch: dense_features [B, num_dense], sparse_features, labels [B]."""
        small = self.small(batch.sparse_features).to_dict()  # each collection gets all sparse features, once
        large = self.large(batch.sparse_features).to_dict()
        found = self.sequences(batch.sparse_features)
        read = []
        for name in self.names:
            rows = found[name].to_padded_dense(max(1, int(found[name].lengths().max())))  # [B, L, dim]
            read.append((self.score(rows).softmax(dim=1) * rows).sum(dim=1))
        parts = [batch.dense_features, *small.values(), *large.values(), *read]
        return self.over(torch.cat(parts, dim=1))


def build(schema: Any, options: dict[str, Any]) -> nn.Module:
    """Return the model for a schema's features, with the settings of `[model.options]`."""
    return BagsAndSequences(schema, hidden=options.get("hidden", 64), dim=options.get("dim", 16))
