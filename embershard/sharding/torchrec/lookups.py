"""TorchRec's lookups and shardings with the cached kernels, in place of FBGEMM's own cache."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup, GroupedPooledEmbeddingsLookup
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

from embershard.sharding.torchrec.kernels import CachedEmbedding, CachedEmbeddingBag
from embershard.sharding.torchrec.spec import has_spec


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
