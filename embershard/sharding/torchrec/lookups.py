"""Kernels of cached tables, and TorchRec's lookups and shardings with them, in place of FBGEMM's own cache."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor, nn
from torchrec.distributed.batched_embedding_kernel import (
    BaseBatchedEmbedding,
    BaseBatchedEmbeddingBag,
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
    EmbeddingFusedOptimizer,
)
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup, GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import BaseEmbeddingLookup, GroupedEmbeddingConfig, ShardingType
from torchrec.distributed.sharding.cw_sequence_sharding import CwSequenceEmbeddingSharding
from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.sharding.twcw_sharding import TwCwPooledEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.errors import ShardingError
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings
from embershard.sharding.torchrec.spec import has_spec


class OwnShardingInfo(EmbeddingShardingInfo):
    """A table of a sharded module that a mode shards in its own way. All tables of a group are of one such class."""

    @staticmethod
    def make_sharding(infos: list[EmbeddingShardingInfo], **place: Any) -> EmbeddingSharding[Any, Any, Any, Any]:
        """Return the sharding of a group of such tables; `place`: what TorchRec's take, `env`, `device` and
        `qcomm_codecs_registry`."""
        raise NotImplementedError


class OwnInput(nn.Module):
    """An input all-to-all of a mode, whose output needs another context than TorchRec's."""

    def take_context(self) -> Any:
        """Return what the output of the newest batch needs; once."""
        raise NotImplementedError


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


class CachedPooledLookup(GroupedPooledEmbeddingsLookup):
    """TorchRec's lookup, with a cached kernel for each group that carries a cache spec."""

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        sharding_type: ShardingType | None,
        *rest: Any,
    ) -> Any:
        if has_spec(config.fused_params):
            return CachedEmbeddingBag(config, pg, device, sharding_type)
        return super()._create_embedding_kernel(config, device, pg, sharding_type, *rest)


class CachedSequenceLookup(GroupedEmbeddingsLookup):
    """TorchRec's lookup, with a cached kernel for each group that carries a cache spec."""

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        *rest: Any,
    ) -> Any:
        if has_spec(config.fused_params):
            self._need_prefetch = True
            return CachedEmbedding(config, pg, device)
        return super()._create_embedding_kernel(config, pg, device, *rest)


class _PooledSharding:
    """Override, shared by all shardings, that creates the cached lookup."""

    _lookup_sharding_type: ClassVar[ShardingType | None] = None

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> BaseEmbeddingLookup:
        groups = getattr(self, "_grouped_embedding_configs", None)
        if groups is None:  # table-row-wise and grid keep the groups of all ranks
            groups = self._grouped_embedding_configs_per_rank[self._rank]  # type: ignore[attr-defined]
        return CachedPooledLookup(
            grouped_configs=groups,
            pg=self._pg,  # type: ignore[attr-defined]
            device=device if device is not None else self._device,  # type: ignore[attr-defined]
            feature_processor=feature_processor,
            sharding_type=self._lookup_sharding_type,
            env=self._env,  # type: ignore[attr-defined]
        )


class _SequenceSharding:
    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> BaseEmbeddingLookup:
        return CachedSequenceLookup(
            grouped_configs=self._grouped_embedding_configs,  # type: ignore[attr-defined]
            pg=self._pg,  # type: ignore[attr-defined]
            device=device if device is not None else self._device,  # type: ignore[attr-defined]
            env=self._env,  # type: ignore[attr-defined]
        )


class _TableWise(_PooledSharding, TwPooledEmbeddingSharding): ...


class _ColumnWise(_PooledSharding, CwPooledEmbeddingSharding): ...


class _TableColumnWise(_PooledSharding, TwCwPooledEmbeddingSharding): ...


class _RowWise(_PooledSharding, RwPooledEmbeddingSharding):
    _lookup_sharding_type = ShardingType.ROW_WISE


class _TableRowWise(_PooledSharding, TwRwPooledEmbeddingSharding):
    _lookup_sharding_type = ShardingType.TABLE_ROW_WISE


class _Grid(_PooledSharding, GridPooledEmbeddingSharding):
    _lookup_sharding_type = ShardingType.TABLE_ROW_WISE


class _TableWiseSequence(_SequenceSharding, TwSequenceEmbeddingSharding): ...


class _RowWiseSequence(_SequenceSharding, RwSequenceEmbeddingSharding): ...


class _ColumnWiseSequence(_SequenceSharding, CwSequenceEmbeddingSharding): ...


POOLED_SHARDINGS: dict[str, type] = {
    ShardingType.TABLE_WISE.value: _TableWise,
    ShardingType.COLUMN_WISE.value: _ColumnWise,
    ShardingType.TABLE_COLUMN_WISE.value: _TableColumnWise,
    ShardingType.ROW_WISE.value: _RowWise,
    ShardingType.TABLE_ROW_WISE.value: _TableRowWise,
    ShardingType.GRID_SHARD.value: _Grid,
}
PERMUTED_SHARDINGS = (ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)

SEQUENCE_SHARDINGS: dict[str, type] = {
    ShardingType.TABLE_WISE.value: _TableWiseSequence,
    ShardingType.COLUMN_WISE.value: _ColumnWiseSequence,
    ShardingType.ROW_WISE.value: _RowWiseSequence,
}
