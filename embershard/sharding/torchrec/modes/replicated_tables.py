"""Whole tables with equal copies on every rank, trained by the fused optimizer of the sharded tables.

TorchRec's own `data_parallel` tables have the compute kernel "dense": DDP averages their gradients, and the optimizer
of the dense layers trains every row in every step. With the compute kernel "fused", a table is one of these.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
from torch import Tensor, nn
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbeddingBag, BatchedFusedEmbeddingBag
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.sharding.dp_sharding import (
    BaseDpEmbeddingSharding,
    DpPooledEmbeddingDist,
    DpSparseFeaturesDist,
)
from torchrec.modules.embedding_configs import PoolingType, data_type_to_dtype, data_type_to_sparse_type
from torchrec.optim.fused import EmptyFusedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.errors import ConfigError, ShardingError
from embershard.sharding.torchrec.feature_keys import add_per_feature, feature_lengths
from embershard.sharding.torchrec.lookups import OwnShardingInfo, check_dims
from embershard.sharding.torchrec.modes.replicated_rows import CopiesOptimizer, ReplicatedRows
from embershard.sharding.torchrec.spec import REPLICATED, REPLICATED_KERNEL
from embershard.sharding.torchrec.table_arguments import check_row_types, check_table_arguments


class ReplicatedShardingInfo(OwnShardingInfo):
    """A table that every rank has a copy of."""

    @staticmethod
    def make_sharding(infos: list[EmbeddingShardingInfo], **place: Any) -> EmbeddingSharding[Any, Any, Any, Any]:
        """Return the sharding of one of the groups that :func:`group_replicated` made."""
        return ReplicatedSharding(infos, place["env"], place["device"])


def group_replicated(infos: dict[str, list[EmbeddingShardingInfo]]) -> dict[str, list[EmbeddingShardingInfo]]:
    """Take replicated tables out of TorchRec's `data_parallel` ones, into groups of equal dim.

    Raises:
        ConfigError: a table's type of rows, or its FBGEMM arguments, do not work on slots, or its pooling is the mean
            of weighted rows.
    """
    grouped: dict[str, list[EmbeddingShardingInfo]] = {}
    for kind, members in infos.items():
        for info in members:
            if (kind, info.param_sharding.compute_kernel) != (REPLICATED, REPLICATED_KERNEL):
                grouped.setdefault(kind, []).append(info)
                continue
            _check(info)
            key = f"{kind}, copies of {info.embedding_config.embedding_dim} columns"
            grouped.setdefault(key, []).append(ReplicatedShardingInfo(**vars(info)))
    return grouped


def _check(info: EmbeddingShardingInfo) -> None:
    config = info.embedding_config
    check_row_types({config.name: data_type_to_dtype(config.data_type)})
    check_table_arguments({config.name: info.fused_params or {}})
    if config.pooling == PoolingType.MEAN and config.is_weighted:
        raise ConfigError(
            f"table {config.name!r}: replicated, with means of weighted rows, whose gradients FBGEMM does not divide "
            "on a CPU. Use SUM, or shard the table"
        )


class ReplicatedSharding(BaseDpEmbeddingSharding[Any, Any, Any, Any]):
    """Ids and pooled embeddings stay on their rank, as with TorchRec's own."""

    def create_input_dist(self, device: torch.device | None = None) -> Any:
        return DpSparseFeaturesDist()

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> Any:
        return _ReplicatedLookup(
            grouped_configs=self._grouped_embedding_configs,
            pg=self._env.process_group,
            device=device if device is not None else self._device,
            feature_processor=feature_processor,
            scale_weight_gradients=False,
            env=self._env,
        )

    def create_output_dist(self, device: torch.device | None = None) -> Any:
        return DpPooledEmbeddingDist()


class _ReplicatedLookup(GroupedPooledEmbeddingsLookup):
    def _create_embedding_kernel(
        self, config: GroupedEmbeddingConfig, device: torch.device | None, pg: dist.ProcessGroup | None, *rest: Any
    ) -> Any:
        return ReplicatedEmbeddingBag(config, pg, device)

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return nothing: TorchRec asks for the shards of sharded tables."""
        return {} if destination is None else destination


class ReplicatedEmbeddingBag(BatchedFusedEmbeddingBag):
    """Pooled embeddings of a group of replicated tables."""

    def __init__(
        self, config: GroupedEmbeddingConfig, pg: dist.ProcessGroup | None, device: torch.device | None
    ) -> None:
        # Skip the parent's constructor: it builds a table that is trained by this rank's gradients alone.
        BaseBatchedEmbeddingBag.__init__(self, config, pg, device)
        check_dims(config)
        self._emb_module = ReplicatedTables(config, self._pooling, device or torch.device("cpu"), pg)
        self._optim = _ReplicatedOptimizer(config, self._emb_module)
        self.init_parameters()

    @property
    def _param_per_table(self) -> dict[str, nn.Parameter]:
        names = [table.name for table in self._config.embedding_tables]
        found = dict(zip(names, map(nn.Parameter, self.split_embedding_weights()), strict=True))
        for parameter in found.values():
            parameter._in_backward_optimizers = [EmptyFusedOptimizer()]  # type: ignore[attr-defined]
        return found

    @_param_per_table.setter
    def _param_per_table(self, value: Any) -> None: ...  # the parent's constructor sets it

    def forward(self, features: KeyedJaggedTensor, vbe_output: Any = None, vbe_output_offsets: Any = None) -> Tensor:
        """Return pooled rows [B, sum of D].

        Raises:
            ShardingError: features differ in their number of samples.
        """
        if features.variable_stride_per_key():
            raise ShardingError(
                "got a batch whose features differ in their number of samples; replicated tables need the same number "
                "for all. Shard these tables"
            )
        weights = features.weights_or_none()
        if weights is not None and not torch.is_floating_point(weights):
            weights = None
        return self._emb_module(features.values(), features.offsets(), weights)


class ReplicatedTables(nn.Module):
    """Several whole tables in :class:`ReplicatedRows`, with the members of an FBGEMM module that TorchRec reads."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pooling_mode: PoolingMode,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        tables = config.embedding_tables
        self._num_rows = [table.num_embeddings for table in tables]
        self._dim = tables[0].embedding_dim
        table_of_feature = [t for t, table in enumerate(tables) for _ in table.feature_names]
        first_row = [0, *accumulate(self._num_rows)]
        self._first_of_feature = torch.tensor([first_row[t] for t in table_of_feature], device=device)
        precision = data_type_to_sparse_type(config.data_type)
        self.rows = ReplicatedRows(
            first_row[-1],
            self._dim,
            table_of_feature,
            device,
            pooling_mode,
            precision,
            config.fused_params or {},
            group,
            f"replicated tables {', '.join(table.name for table in tables)}",
        )

    def forward(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Pool the ids `indices` (int64 [N]) of F features, whose bags have the bounds `offsets`: [B, F * D]."""
        lengths = feature_lengths(offsets, self._first_of_feature.numel())
        rows = add_per_feature(indices, self._first_of_feature, lengths)
        return self.rows(self.rows.prepare(rows, offsets, weights))

    @property
    def embedding_specs(self) -> list[tuple[int, int, EmbeddingLocation, ComputeDevice]]:
        """Rows, dim and location of each table."""
        _, _, location, compute = self.rows.slots.tbe.embedding_specs[0]
        return [(rows, self._dim, location, compute) for rows in self._num_rows]

    def split_embedding_weights(self) -> list[Tensor]:
        """Return the weights per table: views [rows, D]."""
        return list(self.rows.payload[0].split(self._num_rows))

    def table_states(self) -> list[dict[str, Tensor]]:
        """Return the per-row optimizer states of each table: name -> [rows, ...], views."""
        names = [name for name, _, _ in self.rows.slots.state_specs()]
        split = [state.split(self._num_rows) for state in self.rows.payload[1:]]
        return [dict(zip(names, states, strict=True)) for states in zip(*split, strict=True)] or [{}] * len(
            self._num_rows
        )

    def flush(self) -> None:
        """Check that the rows are equal on all ranks. They are where they are read.

        Raises:
            CacheError: a backward did not end on this rank.
        """
        self.rows.guard.check()

    def reset_cache_states(self) -> None:
        """Do nothing: there is no cache."""


class _ReplicatedOptimizer(CopiesOptimizer):
    """The optimizer of a group of replicated tables, with the names that TorchRec gives to sharded tables' states."""

    def __init__(self, config: GroupedEmbeddingConfig, tables: ReplicatedTables) -> None:
        names = [table.name for table in config.embedding_tables]
        params = dict(zip(names, tables.split_embedding_weights(), strict=True))
        state: dict[Tensor, dict[str, Tensor]] = {}
        for name, states in zip(names, tables.table_states(), strict=True):
            # TorchRec's name for the first state of any optimizer is momentum1.
            state[params[name]] = {
                f"{name}.{'momentum1' if number == 0 else key}": value
                for number, (key, value) in enumerate(states.items())
            }
        keyed = {f"{name}.weight": weight for name, weight in params.items()}
        super().__init__([tables.rows.slots], [list(params.values())], keyed, state)
