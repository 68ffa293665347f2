"""A sharded module whose hot rows are on every rank, and whose other rows are in their shards (FAE).

Ids of hot rows stay on their rank; those of cold rows travel to their shard. Pooled hot and cold rows are added. In a
batch that has hot ids only, on all ranks, nothing travels but the gradients of the hot rows, and no cache is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.distributed.types import LazyNoWait, NoWait
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from embershard.cache.key_map import ArrayKeyMap, KeyMap, map_kind
from embershard.errors import ConfigError, ShardingError
from embershard.extras.hot_cold.hot_tables import HotPart, HotTable, HotTables, OutputFeature
from embershard.frequency.statistics import Ints
from embershard.sharding.torchrec.compat import as_keyed_jagged, sharding_group
from embershard.sharding.torchrec.feature_keys import FeaturePlaces, add_per_feature, feature_lengths
from embershard.sharding.torchrec.modes.bags import check_weights
from embershard.sharding.torchrec.modes.mode import Arguments, ShardingInfos, ShardingMode
from embershard.sharding.torchrec.modes.replicated_rows import ReplicatedBags
from embershard.sharding.torchrec.modules import (
    CachedShardedEmbeddingBagCollection,
    cached_kernels,
    ids_are_checked,
    pools_of_module,
)
from embershard.sharding.torchrec.spec import CACHED_KERNEL, SPEC_KEY


@dataclass
class HotColdContext(EmbeddingBagCollectionContext):
    """A batch between its input and its output.

    Attributes:
        hot: its hot ids, by group of copies.
        num_hot_ids: how many these are, with repetitions.
        is_hot: it has hot ids only, on all ranks.
        lengths: [F, B], ids of each bag, in the order of the output's features; None where nothing is averaged.
    """

    hot: list[ReplicatedBags] = field(default_factory=list)
    num_hot_ids: int = 0
    is_hot: bool = False
    lengths: Tensor | None = None

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until `stream` is done with it."""
        super().record_stream(stream)
        parts = [part for slots, bags in self.hot for part in (slots, bags.places, bags.offsets, bags.scales)]
        for tensor in (self.lengths, *parts):
            if tensor is not None:
                tensor.record_stream(stream)


class HotIds:
    """Tells hot ids from cold ones.

    Args:
        tables: with their hot rows.
        table_of_feature: the table of each feature.
        device: of the batches' ids.

    >>> table = HotTable("clicks", 9, torch.tensor([2, 7]), ((0, 4),), None, {})
    >>> ids = HotIds([table], {"click": "clicks"}, torch.device("cpu"))
    >>> cold, hot = ids.split(KeyedJaggedTensor(["click"], torch.tensor([7, 1, 2]), lengths=torch.tensor([2, 1])))
    >>> cold.values().tolist(), cold.lengths().tolist(), hot.values().tolist(), hot.lengths().tolist()
    ([1], [1, 0], [1, 0], [1, 1])
    """

    def __init__(self, tables: Sequence[HotTable], table_of_feature: dict[str, str], device: torch.device) -> None:
        num_rows = sum(table.num_rows for table in tables)
        num_hot = sum(len(table.hot) for table in tables)
        self._numbers: KeyMap  # of the hot rows, from 1 on
        if map_kind(None, num_rows + 1, device.type) == "array":
            self._numbers = ArrayKeyMap(num_rows + 1, device)
        else:
            from embershard.cache.gpu.key_map import PlacedHashedMap  # on a GPU, which needs Triton

            self._numbers = PlacedHashedMap(num_rows + 1, num_hot, device)
        self._first_key: dict[str, int] = {}
        first = 0
        keys = []
        for table in tables:
            keys.append(table.hot + first)
            self._first_key.update((name, first) for name, of in table_of_feature.items() if of == table.name)
            first += table.num_rows
        numbers = torch.arange(1, num_hot + 1, dtype=torch.int32, device=device)
        self._numbers.put(torch.cat(keys).to(device), numbers)
        self._addends: dict[tuple[str, ...], Tensor] = {}

    @property
    def features(self) -> Collection[str]:
        """Features whose ids are split into hot and cold ones."""
        return self._first_key.keys()

    @property
    def num_bytes(self) -> int:
        """Device memory of the map."""
        return self._numbers.num_bytes

    def split(self, features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
        """Return the cold ids and the hot ones, each with all of the features; hot ids as numbers of hot rows."""
        keys, ids, offsets = tuple(features.keys()), features.values(), features.offsets()
        if keys not in self._addends:
            self._addends[keys] = torch.tensor([self._first_key[name] for name in keys], device=ids.device)
        lengths = feature_lengths(offsets, len(keys))
        numbers = self._numbers.get(add_per_feature(ids, self._addends[keys], lengths))
        is_hot = numbers > 0
        before = torch.nn.functional.pad(is_hot.cumsum(0), (1, 0)).index_select(0, offsets.long())
        hot_lengths = before.diff().to(features.lengths().dtype)
        # The one number of the device that the host waits for: the sizes of all that follows.
        of_hot = torch.stack([hots := feature_lengths(before, len(keys)), lengths - hots])
        num_hot, num_cold = of_hot.tolist()
        weights = features.weights_or_none()

        def part(values: Tensor, mask: Tensor, lengths: Tensor, counts: list[int]) -> KeyedJaggedTensor:
            places = mask.nonzero_static(size=sum(counts)).flatten()
            own = None if weights is None else weights.index_select(0, places)
            values = values.index_select(0, places)
            return KeyedJaggedTensor(list(keys), values, own, lengths, stride=features.stride(), length_per_key=counts)

        return (
            part(ids, ~is_hot, features.lengths() - hot_lengths, num_cold),
            part(numbers.long() - 1, is_hot, hot_lengths, num_hot),
        )


class HotColdShardedEmbeddingBagCollection(CachedShardedEmbeddingBagCollection):
    """A cached `ShardedEmbeddingBagCollection` with copies of its hot rows on every rank.

    Attributes:
        num_hot_lookups: ids of hot rows that this rank looked up so far, in training.
    """

    is_in_hot_batch = False
    num_hot_lookups = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        (mode,) = (mode for mode in kwargs["fused_params"][SPEC_KEY].modes if isinstance(mode, HotColdMode))
        device = self._device or torch.device("cpu")
        table_of_feature = {
            name: config.name for config in self._embedding_bag_configs for name in config.feature_names
        }
        tables = self._hot_table_of(mode.hot_rows)
        names = [name.split("@")[0] for name in self._embedding_names]
        output = [OutputFeature(name, tables[table_of_feature[name]]) for name in names]
        self._hot = HotTables(output, device, sharding_group(self._env))
        self._ids = HotIds(list(self._hot.tables.values()), table_of_feature, device)
        pooling = {config.name: config.pooling for config in self._embedding_bag_configs}
        is_mean = [pooling[feature.table.name] == PoolingType.MEAN for feature in output]
        self._has_means = any(is_mean)
        self._is_mean = torch.tensor(is_mean, device=device).unsqueeze(1)
        self._dims = torch.tensor(self._embedding_dims, device=device)
        self._looked_up, self._output_places = (FeaturePlaces(each, device) for each in (list(table_of_feature), names))
        self._has_mean_pooling_callback = False  # sums are divided here, once hot and cold ones are added
        for tables_of_kernel, pool in cached_kernels(self):
            pool.cache.parts.add(HotPart(self._hot, pool.host))
            for table, first_key in zip(tables_of_kernel, pool.host.row_offsets, strict=True):
                row, column = table.local_metadata.shard_offsets
                self._hot.add_shard(pool.host, table.name, (row, table.local_rows), column, first_key)
        self._optim = CombinedOptimizer([*self.fused_optimizer.optimizers, ("", self._hot.optimizer)])

    def _hot_table_of(self, hot_rows: Mapping[str, Tensor]) -> dict[str, HotTable]:
        found = {}
        for infos in self.sharding_type_to_sharding_infos.values():
            for info in infos:
                config = info.embedding_config
                spec: Any = info.param_sharding.sharding_spec
                parts = {(shard.shard_offsets[1], shard.shard_sizes[1]) for shard in spec.shards}
                fused_params = {k: v for k, v in (info.fused_params or {}).items() if k != SPEC_KEY}
                hot = hot_rows.get(config.name, torch.empty(0, dtype=torch.int64))
                if len(hot) and int(hot[-1]) >= config.num_embeddings:
                    raise ConfigError(
                        f"hot_rows of table {config.name!r}: got row {int(hot[-1])}, but it has "
                        f"{config.num_embeddings} rows. Take them from a profile of the same data and model"
                    )
                found[config.name] = HotTable(
                    config.name, config.num_embeddings, hot, tuple(sorted(parts)), config.data_type, fused_params
                )
        return found

    @classmethod
    def create_grouped_sharding_infos(cls, module: Any, *args: Any) -> ShardingInfos:
        """Let the shards add rows up without dividing.

        Raises:
            ConfigError: a table that is not cached, a feature of two tables, or means of weighted rows.
        """
        grouped = super().create_grouped_sharding_infos(module, *args)
        infos = [info for group in grouped.values() for info in group]
        others = sorted(i.embedding_config.name for i in infos if i.param_sharding.compute_kernel != CACHED_KERNEL)
        if others:
            raise ConfigError(
                f"tables {others[:5]} are placed without a cache; with hot rows on every rank all tables need one, as "
                'their ids would travel in hot batches, too. Plan them with kernel "cached"'
            )
        features = [name for info in infos for name in info.embedding_config.feature_names]
        twice = sorted({name for name in features if features.count(name) > 1})
        if twice:
            raise ConfigError(f"features {twice[:5]} look into two tables each, which hot rows on every rank exclude")
        means = sorted(i.embedding_config.name for i in infos if i.embedding_config.pooling == PoolingType.MEAN)
        if means and infos[0].embedding_config.is_weighted:
            raise ConfigError(f"tables {means[:5]}: means of weighted rows, with hot rows on every rank. Use SUM")
        for info in infos:
            info.embedding_config.pooling = PoolingType.SUM
        return grouped

    def copied_rows(self) -> tuple[int, int]:
        """Return the bytes of the hot rows, their optimizer states and the map that finds them, and their lookups."""
        return self._hot.num_bytes + self._ids.num_bytes, self.num_hot_lookups

    def host_rows_changed(self, table: str | None, rows: Tensor | None) -> None:
        """Copy rows that were written to from the host tiers of all ranks. Collective."""
        self._hot.host_rows_changed(table, rows)

    @contextmanager
    def in_batch(self, batch: Any) -> Iterator[None]:
        """Return a context in which this module gets ids of `batch`, whose `is_hot` says that they are hot on all
        ranks."""
        before, self.is_in_hot_batch = self.is_in_hot_batch, getattr(batch, "is_hot", False)
        try:
            yield
        finally:
            self.is_in_hot_batch = before

    def create_context(self) -> HotColdContext:
        return HotColdContext()

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Check the ids, keep the hot ones, and run TorchRec's input all-to-all on the others, if any rank has some.

        Raises:
            ShardingError: features differ in their number of samples; or cold ids in a batch without.
            ConfigError: the tables are weighted, and the ids are not.
        """
        features = as_keyed_jagged(features)
        if self._is_weighted:
            check_weights(features, "hot rows on every rank")
        if features.variable_stride_per_key():
            raise ShardingError(
                "got a batch whose features differ in their number of samples; hot rows on every rank need the same "
                "number for all"
            )
        if not self._ids_are_checked:
            self.check_ids(features)
        if len(self._ids.features) < len(features.keys()):  # others that no table uses
            features = features.permute(*self._looked_up.of(features.keys()))
        with torch.no_grad():
            cold, hot = self._ids.split(features)
            ctx.num_hot_ids = hot.values().numel()
            ctx.hot, ctx.is_hot = self._hot.prepare(hot), self.is_in_hot_batch
            if self._has_means:
                _, places = self._output_places.of(features.keys())
                ctx.lengths = features.lengths().view(len(places), -1).index_select(0, places)
        if not ctx.is_hot:
            with ids_are_checked(self):
                return super().input_dist(ctx, cold)
        if cold.values().numel():
            raise ShardingError(
                f"a batch was said to have hot rows only, and {cold.values().numel()} of its ids are of other rows. "
                "Classify the samples by the hot rows that the model was built with"
            )
        return NoWait(NoWait(KJTList([])))

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Look up; run TorchRec's output all-to-all, if cold ids travelled; add hot and cold embeddings."""
        if torch.is_grad_enabled():  # caches do not count evaluations either
            self.num_hot_lookups += ctx.num_hot_ids
        if not ctx.is_hot:
            awaitable = super().compute_and_output_dist(ctx, input)
            awaitable.callbacks.append(partial(self._add, hot=self._hot.pool(ctx.hot), ctx=ctx))
            return awaitable
        for pool in pools_of_module(self):
            pool.slots.count_reading()  # as stock does for a batch without its rows
        return LazyNoWait(self._output(self._hot.pool(ctx.hot), ctx))

    def _add(self, cold: KeyedTensor, hot: Tensor, ctx: HotColdContext) -> KeyedTensor:
        return self._output(cold.values() + hot.to(cold.values().dtype), ctx)

    def _output(self, values: Tensor, ctx: HotColdContext) -> KeyedTensor:
        if ctx.lengths is not None:
            of_bag = torch.where(self._is_mean, ctx.lengths.clamp(min=1), 1).to(values.dtype).reciprocal()
            values = values * of_bag.t().repeat_interleave(self._dims, dim=1, output_size=values.shape[1])
        return KeyedTensor(keys=self._embedding_names, length_per_key=self._embedding_dims, values=values)

    @staticmethod
    def _pre_load_state_dict_hook(module: Any, *args: Any) -> None:
        """Take the hot rows from the host tier before the next batch."""
        CachedShardedEmbeddingBagCollection._pre_load_state_dict_hook(module, *args)
        module._hot.host_was_loaded()


class HotColdMode(ShardingMode):
    """`hot_rows`: each table's rows with copies on every rank, int64 ascending."""

    splits_bags = True

    def __init__(self, arguments: Arguments) -> None:
        self.hot_rows = {table: _ascending(table, rows) for table, rows in arguments["hot_rows"].items()}

    def __str__(self) -> str:
        return "hot_rows"

    @property
    def bags_module(self) -> type:
        return HotColdShardedEmbeddingBagCollection

    def uncached_rows(self, table: str) -> Ints:
        return self.hot_rows[table].numpy() if table in self.hot_rows else np.empty(0, np.int64)


def _ascending(table: str, rows: Tensor) -> Tensor:
    """Return hot rows in order; raise `ConfigError` where they are not rows, or some are in twice."""
    distinct = rows.long().cpu().unique()
    if len(distinct) < rows.numel() or (len(distinct) and int(distinct[0]) < 0):
        raise ConfigError(f"hot_rows of table {table!r}: needed distinct row numbers from 0 on")
    return distinct


def announce_hot_batches(model: nn.Module) -> None:
    """Tell the modules of `model`, before each of its forwards, whether the batch has hot ids only."""
    modules = [each for each in model.modules() if isinstance(each, HotColdShardedEmbeddingBagCollection)]

    def note(_: nn.Module, args: tuple[Any, ...]) -> None:
        for module in modules:
            module.is_in_hot_batch = bool(args) and getattr(args[0], "is_hot", False)

    model.register_forward_pre_hook(note)
