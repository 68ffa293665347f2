"""Compute kernels of cached tables, as TorchRec's lookups expect them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor
from torchrec.distributed.batched_embedding_kernel import (
    BaseBatchedEmbedding,
    BaseBatchedEmbeddingBag,
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
    EmbeddingFusedOptimizer,
)
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.errors import ShardingError
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings


class CachedFusedOptimizer(EmbeddingFusedOptimizer):
    """TorchRec's fused optimizer over the host tier. It writes trained rows back before its states are read or
    replaced."""

    @property
    def state(self) -> Any:
        """Optimizer states per parameter, up to date."""
        module = self.__dict__.get("_emb_module")
        if module is not None:
            module.write_back()  # states start as zeros: no row must be made for them
        return self.__dict__["_state"]

    @state.setter
    def state(self, value: Any) -> None:
        self.__dict__["_state"] = value

    def post_load_state_dict(self) -> None:
        """Fetch the cached rows again: the host tier has new states."""
        self._emb_module.reset_cache_states()


class CachedEmbeddingBag(BatchedFusedEmbeddingBag):
    """Pooled embeddings of a group of cached tables."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        sharding_type: ShardingType | None = None,
    ) -> None:
        # Skip the parent's constructor: it builds FBGEMM's own table with all rows on the device.
        BaseBatchedEmbeddingBag.__init__(self, config, pg, device, sharding_type)
        check_dims(config)
        self._emb_module = CachedTableBatchedEmbeddings(config, self._pooling, device)
        self._optim = CachedFusedOptimizer(config, self._emb_module, pg)
        if not self._emb_module.host.makes_weights:
            self.init_parameters()

    def forward(
        self,
        features: KeyedJaggedTensor,
        vbe_output: Tensor | None = None,
        vbe_output_offsets: Any = None,
    ) -> Tensor:
        """Return pooled rows [B, sum of D], flat with a batch size per feature.

        The parent passes the arguments for that on to FBGEMM's own modules only.
        """
        weights = features.weights_or_none()
        if weights is not None and not torch.is_floating_point(weights):
            weights = None
        variable_batch: dict[str, Any] = {}
        if features.variable_stride_per_key():
            variable_batch["batch_size_per_feature_per_rank"] = features.stride_per_key_per_rank()
            if vbe_output is not None:
                variable_batch.update(vbe_output=vbe_output, vbe_output_offsets=vbe_output_offsets)
        return self._emb_module(features.values(), features.offsets(), weights, **variable_batch)


class CachedEmbedding(BatchedFusedEmbedding):
    """Sequence embeddings of a group of cached tables."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        BaseBatchedEmbedding.__init__(self, config, pg, device)
        check_dims(config)
        self._emb_module = CachedTableBatchedEmbeddings(config, PoolingMode.NONE, device, pg)
        self._optim = CachedFusedOptimizer(config, self._emb_module, pg)
        if not self._emb_module.host.makes_weights:
            self.init_parameters()

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return rows [N, D], one per id."""
        return self._emb_module(features.values(), features.offsets())


def check_dims(config: GroupedEmbeddingConfig) -> None:
    """Raise `ShardingError` for a number of columns that FBGEMM cannot train."""
    for table in config.embedding_tables:
        if table.local_cols % 4:
            next_dim = table.embedding_dim + -table.embedding_dim % 4
            raise ShardingError(
                f"table {table.name!r} has {table.local_cols} columns on this rank; FBGEMM needs a multiple "
                f"of 4. Use embedding_dim {next_dim}, or another min_partition"
            )
