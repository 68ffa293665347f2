"""One rank's pool of cached tables, as TorchRec would construct it, without a process group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.modules.embedding_configs import DataType, PoolingType

from embershard import CacheConfig
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings
from embershard.sharding.torchrec.spec import SPEC_KEY, CacheSpec

OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
}


def make_table(
    name: str, rows: int, dim: int, data_type: DataType, load_factor: float | None = None
) -> ShardedEmbeddingTable:
    """A table of which this rank holds ``rows`` whole rows."""
    return ShardedEmbeddingTable(
        num_embeddings=max(rows, 1),
        embedding_dim=dim,
        name=name,
        embedding_names=[f"f{name}"],
        feature_names=[f"f{name}"],
        data_type=data_type,
        pooling=PoolingType.SUM,
        is_weighted=False,
        has_feature_processor=False,
        compute_kernel=EmbeddingComputeKernel.FUSED_UVM_CACHING,
        local_rows=rows,
        local_cols=dim,
        fused_params={"cache_load_factor": load_factor} if load_factor else {},
    )


def make_spec(config: CacheConfig, rank_weights: int) -> CacheSpec:
    """The spec of a rank that holds ``rank_weights`` elements of cached tables."""
    return CacheSpec(config, policy=config.policy_for(False), profile=None, rank=0, rank_weights=rank_weights)


def make_pool(
    rows: Sequence[int] = (40, 7),
    config: CacheConfig | None = None,
    *,
    dim: int = 8,
    optimizer: str = "rowwise_adagrad",
    data_type: DataType = DataType.FP32,
    rank_weights: int | None = None,
    load_factors: Sequence[float | None] = (),
    fused_params: Mapping[str, Any] | None = None,
) -> CachedTableBatchedEmbeddings:
    """A pool of tables t0, t1, ... with random rows; ``rank_weights`` if the rank has further pools."""
    factors = [*load_factors, *[None] * len(rows)]
    tables = [make_table(f"t{i}", n, dim, data_type, factors[i]) for i, n in enumerate(rows)]
    spec = make_spec(config or CacheConfig(ratio=0.5), rank_weights or sum(rows) * dim)
    arguments: dict[str, Any] = {
        SPEC_KEY: spec,
        "optimizer": OPTIMIZERS[optimizer],
        "learning_rate": 0.1,
        **(fused_params or {}),
    }
    group = GroupedEmbeddingConfig(
        data_type=data_type,
        pooling=PoolingType.SUM,
        is_weighted=False,
        has_feature_processor=False,
        compute_kernel=EmbeddingComputeKernel.FUSED_UVM_CACHING,
        embedding_tables=tables,
        fused_params=arguments,
    )
    pool = CachedTableBatchedEmbeddings(group, PoolingMode.SUM, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    pool.host.weights.copy_(torch.rand(pool.host.weights.shape, generator=generator))
    return pool
