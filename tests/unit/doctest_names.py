"""Names that examples in docstrings may use: a small sharded model on one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard import CacheConfig, CachedEmbeddingBagCollectionSharder, plan_sharding

CPU = torch.device("cpu")


class Clicks(nn.Module):
    """One table of 1000 rows; returns losses and output, as train pipelines expect."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(name="clicks", embedding_dim=8, num_embeddings=1000, feature_names=["click"])
        self.tables = EmbeddingBagCollection([table], device=torch.device("meta"))
        self.over = nn.Linear(8, 1)

    def forward(self, batch: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        output = self.over(self.tables(batch).values()).squeeze(1)
        return output.square().mean().unsqueeze(0), output


def names() -> dict[str, Any]:
    """``model``, which trained one batch of ids 7, 8 and 9, its ``optimizer``, and 8 batches in ``loader``. Needs a
    process group of one rank."""
    sharders: Any = [CachedEmbeddingBagCollectionSharder(CacheConfig(ratio=0.1))]
    model = Clicks()
    plan = plan_sharding(model, sharders, world_size=1, local_world_size=1, device=CPU)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = DistributedModelParallel(model, env=env, device=CPU, plan=plan, sharders=sharders)
    loader = [
        KeyedJaggedTensor(["click"], torch.arange(3) + 7 + step, lengths=torch.ones(3, dtype=torch.int64))
        for step in range(8)
    ]
    losses, _ = sharded(loader[0])
    losses.sum().backward()
    optimizer = torch.optim.SGD(sharded.module.over.parameters(), lr=0.1)
    return {"model": sharded, "optimizer": optimizer, "loader": loader}
