"""The exchange of distinct rows: each row travels once per rank and batch, and is pooled where the samples are.

TorchRec's pooled shardings look up and pool on the rank that has the rows, and send one vector per bag. These
shardings send the distinct ids of a batch as one bag per table, through TorchRec's sequence shardings; what comes back
is one row per distinct id. The autograd of the pooling adds up the gradients of each row before they travel.

```text
  a batch's ids ──▶ distinct ids ──▶ all-to-all ──▶ rows of the owner
        │                                                  │
        └──▶ bags over the rows ◀── one of each row ◀──────┘ all-to-all
```
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import ShardingType
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.types import Awaitable
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.cache.rows import memory
from embershard.errors import ConfigError, ShardingError
from embershard.sharding.sharding_types import ROWS_TYPES
from embershard.sharding.shards import Exchange
from embershard.sharding.torchrec.lookups import SEQUENCE_SHARDINGS, OwnInput, OwnShardingInfo
from embershard.sharding.torchrec.modes.bags import Bags, DistinctIds, check_weights
from embershard.sharding.torchrec.modes.mode import Arguments, ShardingInfos, ShardingMode
from embershard.sharding.torchrec.spec import REPLICATED

_COLUMN_WISE = SEQUENCE_SHARDINGS[ShardingType.COLUMN_WISE.value]


@dataclass
class RowsContext(SequenceShardingContext):
    """A batch between its input and its output all-to-all. `union`: with data-parallel tables, see there."""

    bags: Bags | None = None
    union: Any = None

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until `stream` is done with it."""
        super().record_stream(stream)
        assert self.bags is not None
        for tensor in (self.bags.places, self.bags.offsets, self.bags.scales):
            if tensor is not None:
                tensor.record_stream(stream)


class RowsInput(OwnInput):
    """Input all-to-all of the distinct ids of each table.

    Args:
        inner: TorchRec's, for sequences.
        num_features: features of each table, in the order of the input's keys.
        is_mean: for each feature, whether its bags are averaged here.
        is_weighted: the tables are.
    """

    _is_mean: Tensor

    def __init__(
        self,
        inner: nn.Module,
        num_features: Sequence[int],
        is_mean: Sequence[bool],
        device: torch.device | None = None,
        is_weighted: bool = False,
    ) -> None:
        super().__init__()
        self._inner, self._is_weighted = inner, is_weighted
        self._num_features = num_features
        self._has_means = any(is_mean)
        self.register_buffer("_is_mean", torch.tensor(is_mean, device=device).unsqueeze(1), persistent=False)
        self._context: RowsContext | None = None

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Start the all-to-all; :meth:`take_context` then returns what the output needs.

        Raises:
            ShardingError: features differ in their number of samples.
            ConfigError: the tables are weighted, and the ids are not.
        """
        if self._is_weighted:
            check_weights(features, "exchange of distinct rows")
        if features.variable_stride_per_key():
            raise ShardingError(
                "got a batch whose features differ in their number of samples; the exchange of distinct rows needs the "
                'same number for all. Use exchange = "pooled"'
            )
        keys, per_feature = features.keys(), iter(features.length_per_key())
        per_table = [sum(next(per_feature) for _ in range(count)) for count in self._num_features]
        found = DistinctIds.of(features.values(), per_table)
        lengths = [0] * len(keys)  # a table's distinct ids are its first feature's
        first = 0
        for count, num_distinct in zip(self._num_features, found.counts, strict=True):
            lengths[first] = num_distinct
            first += count
        distinct = KeyedJaggedTensor(
            keys=keys,
            values=found.ids,
            lengths=memory.on_device(lengths, found.ids.device, features.lengths().dtype),
            stride=1,
            length_per_key=lengths,
        )
        awaitable = self._inner(distinct)
        self._context = RowsContext(
            batch_size_per_feature_pre_a2a=features.stride_per_key(),
            unbucketize_permute_tensor=getattr(self._inner, "unbucketize_permute_tensor", None),
            union=getattr(self._inner, "union", None),
            bags=Bags(found.inverse, features.offsets().long(), self._scales(features), len(keys)),
        )
        return awaitable

    def take_context(self) -> RowsContext:
        """Return the context of the newest forward; once."""
        context, self._context = self._context, None
        assert context is not None
        return context

    def _scales(self, features: KeyedJaggedTensor) -> Tensor | None:
        if not self._has_means:
            weights = features.weights_or_none()
            return weights if weights is not None and torch.is_floating_point(weights) else None
        lengths = features.lengths().view(len(self._is_mean), -1)
        of_bag = torch.where(self._is_mean, lengths, 1).float().reciprocal().flatten()
        return of_bag.repeat_interleave(lengths.flatten(), output_size=features.values().numel())


class _PooledRows(Awaitable[Tensor]):
    def __init__(self, rows: Awaitable[Tensor], bags: Bags, dim: int, order: Tensor | None) -> None:
        super().__init__()
        self._rows, self._bags, self._dim, self._order = rows, bags, dim, order

    def _wait_impl(self) -> Tensor:
        pooled = self._bags.pool(self._rows.wait().view(-1, self._dim))
        if self._order is None:
            return pooled
        parts = pooled.unflatten(1, (len(self._order), self._dim))
        return parts.index_select(1, self._order).flatten(1)


class RowsOutput(nn.Module):
    """Output all-to-all of distinct rows, and the pooling of what arrives.

    Args:
        inner: TorchRec's, for sequences.
        dim: columns of a row, or of a column shard.
        order: of the features' parts in the output, where several are the columns of one embedding; else None.
    """

    _order: Tensor | None

    def __init__(self, inner: nn.Module, dim: int, order: Sequence[int] | None, device: torch.device | None) -> None:
        super().__init__()
        self._inner, self._dim = inner, dim
        places = None if order is None else torch.tensor(order, device=device)
        self.register_buffer("_order", places, persistent=False)

    def forward(self, rows: Tensor, context: RowsContext) -> Awaitable[Tensor]:
        """Send the rows that this rank looked up; the awaitable gives pooled embeddings [B, sum of D]."""
        assert context.bags is not None
        sent = self._inner(rows.view(-1, self._dim), context)
        return _PooledRows(sent, context.bags, self._dim, self._order)


class ExchangesRows:
    """Overrides of TorchRec's sequence shardings."""

    def create_input_dist(self, device: torch.device | None = None) -> RowsInput:
        tables = self.embedding_tables()  # type: ignore[attr-defined]
        # TorchRec divides the sums of row-wise shards by the bags' lengths itself, after the exchange.
        averages = not isinstance(self, SEQUENCE_SHARDINGS[ShardingType.ROW_WISE.value])
        is_mean = [averages and table.pooling == PoolingType.MEAN for table in tables for _ in table.feature_names]
        if any(is_mean) and tables[0].is_weighted:
            names = [table.name for table in tables if table.pooling == PoolingType.MEAN][:5]
            raise ConfigError(
                f'tables {names}: exchange "rows" with means of weighted rows, on which FBGEMM and TorchRec disagree '
                '(which divide by the number of ids, and by the sum of weights). Use SUM, or exchange "pooled"'
            )
        device = self._device if device is None else device  # type: ignore[attr-defined]  # TorchRec gives none
        inner = super().create_input_dist(device)  # type: ignore[misc]
        return RowsInput(inner, [len(table.feature_names) for table in tables], is_mean, device, tables[0].is_weighted)

    def create_output_dist(self, device: torch.device | None = None) -> RowsOutput:
        device = self._device if device is None else device  # type: ignore[attr-defined]
        inner = super().create_output_dist(device)  # type: ignore[misc]
        order = getattr(self, "_embedding_order", None)
        if order == sorted(order or ()):
            order = None
        return RowsOutput(inner, self.embedding_tables()[0].local_cols, order, device)  # type: ignore[attr-defined]


_SHARDINGS: dict[str, type] = {
    kind: type(f"{cls.__name__.lstrip('_')}Rows", (ExchangesRows, cls), {}) for kind, cls in SEQUENCE_SHARDINGS.items()
}
_SHARDINGS[ShardingType.TABLE_COLUMN_WISE.value] = _SHARDINGS[ShardingType.COLUMN_WISE.value]


class RowsShardingInfo(OwnShardingInfo):
    """A table whose distinct rows are exchanged."""

    @staticmethod
    def make_sharding(infos: list[EmbeddingShardingInfo], **place: Any) -> EmbeddingSharding[Any, Any, Any, Any]:
        """Return the sharding of one of the groups that :class:`RowsExchangeMode` made."""
        sharding = _SHARDINGS[infos[0].param_sharding.sharding_type]
        extra = {"permute_embeddings": True} if issubclass(sharding, _COLUMN_WISE) else {}
        return sharding(sharding_infos=infos, **place, **extra)


class RowsExchangeMode(ShardingMode):
    """`exchange="rows"`, or a plan that says so per table."""

    needs_ranks: ClassVar[bool] = True
    uses_caches_alone: ClassVar[bool] = True

    def __init__(self, arguments: Arguments) -> None:
        exchange, plan = arguments["exchange"], arguments["plan"]
        if exchange not in get_args(Exchange):  # such as "auto", which needs a plan
            raise ConfigError(
                f"exchange: got {exchange!r}, needed one of {', '.join(get_args(Exchange))}. To choose per table, make "
                "a plan (embershard plan --set sharding.exchange=auto) and train with it"
            )
        if plan is not None and exchange != "pooled":
            raise ConfigError(f"exchange={exchange!r} has no effect with a plan, which says it per table. Remove one")
        self._tables = None if plan is None else {table.table for table in plan.tables if table.exchange == "rows"}
        if plan is None:
            self.splits_bags, self.types = True, [REPLICATED, *ROWS_TYPES]

    def __str__(self) -> str:
        return 'exchange="rows"'

    def are_by_columns(self, table: str) -> bool:
        return self._tables is None or table in self._tables

    def group(self, infos: ShardingInfos, spec: Any, is_sequence: bool) -> ShardingInfos:
        """Give its tables to groups by type and columns."""
        grouped: ShardingInfos = {}
        for kind, members in infos.items():
            for info in members:
                name = info.embedding_config.name
                if kind == REPLICATED or not self.are_by_columns(name):
                    grouped.setdefault(kind, []).append(info)
                else:
                    key = f"{kind}, rows of {_columns(name, kind, info)}"
                    grouped.setdefault(key, []).append(RowsShardingInfo(**vars(info)))
        return grouped


def _columns(name: str, kind: str, info: EmbeddingShardingInfo) -> int:
    if kind not in ROWS_TYPES:
        raise ConfigError(
            f'table {name!r}: exchange "rows" with sharding {kind!r}; needed one of {", ".join(ROWS_TYPES)}. Give '
            'it another sharding, or exchange "pooled"'
        )
    spec: Any = info.param_sharding.sharding_spec
    columns = {shard.shard_sizes[1] for shard in spec.shards}
    if len(columns) > 1:
        raise ConfigError(
            f'table {name!r}: exchange "rows" needs column shards of equal size, got {sorted(columns)} columns. Change '
            'the number of shards, or use exchange "pooled"'
        )
    return columns.pop()
