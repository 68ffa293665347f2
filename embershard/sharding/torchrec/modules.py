"""TorchRec's sharded modules: they pass the cache spec to the kernels and check ids before the input all-to-all.

Ids are checked on the rank that read them, where the user's names still apply. After the all-to-all it is too late:
FBGEMM trains row 0 for an id that is too large (with one warning), and row-wise sharding sends such an id to some rank
as some row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import ShardedEmbeddingTable
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_dtype
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.cache import loops
from embershard.distributed.changed_rows import NO_ID
from embershard.errors import ConfigError, IdOutOfRangeError
from embershard.known_bounds import ANY_ID, bounds_of
from embershard.sharding.torchrec.compat import as_keyed_jagged, lookups_of, supported, with_own_columns
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings
from embershard.sharding.torchrec.lookups import (
    PERMUTED_SHARDINGS,
    POOLED_SHARDINGS,
    SEQUENCE_SHARDINGS,
    OwnInput,
    OwnShardingInfo,
)
from embershard.sharding.torchrec.modes.mode import ShardingInfos
from embershard.sharding.torchrec.modes.replicated_tables import group_replicated
from embershard.sharding.torchrec.spec import CACHED_KERNEL, SPEC_KEY, has_spec
from embershard.sharding.torchrec.table_arguments import check_host_types, check_row_types, check_table_arguments


def _mark_cached(infos: ShardingInfos, spec: Any) -> ShardingInfos:
    """Give the spec to the cached tables. `prefetch_pipeline` makes TorchRec group them apart, by dim; and a spec of
    their own those whose weight needs no gradient: they are not trained.

    Raises:
        ConfigError: a table's type of rows, or its FBGEMM arguments, do not work on slots. On every rank.
    """
    every = [info for group in infos.values() for info in group]
    cached = [info for info in every if info.param_sharding.compute_kernel == CACHED_KERNEL]
    configs = [info.embedding_config for info in cached]
    types = {config.name: data_type_to_dtype(config.data_type) for config in configs}
    check_row_types(types)
    check_host_types(types, spec.config)
    check_table_arguments({info.embedding_config.name: info.fused_params or {} for info in cached})
    frozen = replace(spec, trains=False)
    for info in cached:
        own = spec if info.param.requires_grad else frozen
        given = info.fused_params or {}
        info.fused_params = {**given, **own.of_table(info.embedding_config.name), "prefetch_pipeline": True}
    return infos


def _without_spec(fused_params: dict[str, Any] | None) -> tuple[dict[str, Any], Any]:
    rest = dict(fused_params or {})
    return rest, rest.pop(SPEC_KEY)


def cached_kernels(module: Any) -> Iterator[tuple[list[ShardedEmbeddingTable], CachedTableBatchedEmbeddings]]:
    """Yield the table shards and the pool of every cached kernel of a sharded module on this rank."""
    for lookup in lookups_of(module):
        for kernel in lookup._emb_modules:
            if isinstance(kernel.emb_module, CachedTableBatchedEmbeddings):
                yield kernel.config.embedding_tables, kernel.emb_module


def pools_of_module(module: Any) -> list[CachedTableBatchedEmbeddings]:
    """Return the pools of a sharded module on this rank."""
    return [pool for _, pool in cached_kernels(module)]


class _CachedTable(nn.Module):
    """Holder of a cached table's parameter `weight`: code that asks for it by name gets rows with initial weights."""

    pools: list[CachedTableBatchedEmbeddings]

    @property
    def weight(self) -> nn.Parameter:
        """The rows of this rank. Trained rows are up to date after `embershard.flush`."""
        for pool in self.pools:
            pool.host.check_views()
            pool.host.make_all()
        return self._parameters["weight"]  # type: ignore[return-value]


class StatesBeside(Protocol):
    """Tensors of a sharded module's tables in its state dicts, beside their weights."""

    def add_to(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Add them to a state dict."""

    def take_from(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Take them over from a state dict, out of which they go."""


class CachedModule:
    """What both sharded modules have in common: overrides of TorchRec's."""

    _rows_by_feature: dict[str, tuple[str, int]]
    _table_of_ids: Mapping[str, str] = {}
    _states_beside: StatesBeside | None = None
    _ids_are_checked = False
    _has_counter_init = False

    def _initialize_torch_state(self, *args: Any, **kwargs: Any) -> None:
        """Let TorchRec refer to the rows' memory. It gets the memory through state dicts, and no row is made."""
        pools = pools_of_module(self)
        with ExitStack() as stack:
            for pool in pools:
                stack.enter_context(pool.without_flushes())
            super()._initialize_torch_state(*args, **kwargs)  # type: ignore[misc]
        for pool in pools:
            pool.holder = self.holder
        if self._has_counter_init:
            holders = getattr(self, self.holder)
            for name in {name for pool in pools for name in pool.cache.tables}:
                holders[name].__class__ = _CachedTable
                holders[name].__dict__["pools"] = pools

    @property
    def holder(self) -> str:
        """Name of the attribute that has the tables' weights."""
        return "embedding_bags" if hasattr(self, "embedding_bags") else "embeddings"

    def reset_parameters(self) -> None:
        """Initialize as TorchRec does; do nothing where sharder and host tier make the weights, from a counter."""
        if not self._has_counter_init:
            super().reset_parameters()  # type: ignore[misc]

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Check the ids, then run TorchRec's input all-to-all."""
        if not self._ids_are_checked:
            self.check_ids(features)
        return super().input_dist(ctx, features)  # type: ignore[misc]

    def check_ids(self, features: Any) -> None:
        """Raise `IdOutOfRangeError` for an out-of-range id. Not collective. Features of which it is known that they
        have none are not read: that takes milliseconds of the thread that trains, and on a GPU a wait."""
        features = as_keyed_jagged(features)
        known = bounds_of(features)
        rows = self._rows_by_feature
        if rows := {key: rows[key] for key in rows if known.get(key, ANY_ID) > rows[key][1]}:
            check_bounds(features, rows)
        if tables := {key: table for key, table in self._table_of_ids.items() if key not in known}:
            check_any_ids(features, tables)

    def _note_features(self, configs: Sequence[BaseEmbeddingConfig], spec: Any) -> None:
        """Note which features have row numbers of which table, and which have any ids."""
        with_ids = [config for config in configs if any(mode.gives_rows(config.name) for mode in spec.modes)]
        self._rows_by_feature = rows_by_feature([config for config in configs if config not in with_ids])
        self._table_of_ids = {name: config.name for config in with_ids for name in config.feature_names}
        for mode in spec.modes:
            mode.note_module(self, configs)
        both = sorted(self._table_of_ids.keys() & self._rows_by_feature.keys())
        if both:
            raise ConfigError(
                f"feature {both[0]!r}: table {self._table_of_ids[both[0]]!r} takes any id, and table "
                f"{self._rows_by_feature[both[0]][0]!r} row numbers; needed tables of one kind. Give one of them a "
                "feature of its own, or name both tables in ids"
            )

    def add_states(self, states: StatesBeside) -> None:
        """Let the module's state dicts have these tensors, too."""
        self._states_beside = states
        self._register_state_dict_hook(lambda _, found, prefix, *__: states.add_to(found, prefix))  # type: ignore[attr-defined]

    def _apply(self, function: Any, recurse: bool = True) -> Any:
        """Move or convert all but the cached tables' rows, which stay in host memory.

        `DistributedModelParallel` moves the whole model to the device, and would copy every table.
        """
        holders = getattr(self, self.holder)
        plan = self.module_sharding_plan  # type: ignore[attr-defined]
        cached = [name for name in holders if plan[name].compute_kernel == CACHED_KERNEL]
        weights = {name: holders[name]._parameters.pop("weight") for name in cached}
        try:
            return super()._apply(function, recurse)  # type: ignore[misc]
        finally:
            for name, weight in weights.items():
                holders[name]._parameters["weight"] = weight

    @staticmethod
    def _pre_load_state_dict_hook(module: Any, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Flush first: tables that the state dict leaves out keep what they learned."""
        for lookup in lookups_of(module):
            lookup.flush()
        if module._states_beside is not None:
            module._states_beside.take_from(state_dict, prefix)
        with_own_columns(module, state_dict, prefix)
        # TorchRec's hook of a collection for sequences reads every table out of the state dict, there or not.
        there = {name.rpartition(".")[0].rpartition(".")[2] for name in state_dict if name.startswith(prefix)}
        shards = module._model_parallel_name_to_local_shards
        module._model_parallel_name_to_local_shards = {t: each for t, each in shards.items() if t in there}
        try:
            super()._pre_load_state_dict_hook(module, state_dict, prefix, *args)  # type: ignore[misc]
        finally:
            module._model_parallel_name_to_local_shards = shards

    def in_batch(self, batch: Any) -> AbstractContextManager[None]:
        """Return a context in which this module gets ids of `batch`; for modes whose work depends on the batch."""
        return nullcontext()

    def copied_rows(self) -> tuple[int, int]:
        """Return the device memory of rows with copies on every rank, and how many ids of them were looked up so far;
        no cache counts these."""
        return 0, 0

    def host_rows_changed(self, table: str | None, rows: Tensor | None) -> None:
        """Do nothing: the pools know of a write to host rows. Modes that keep copies of rows take them again."""

    def _fetch_shared_rows(self, *_: Any) -> None:
        """After a load, fetch cached rows that other ranks loaded. Collective where ranks share rows."""
        for pool in pools_of_module(self):
            if pool.host.is_shared:
                pool.reset_cache_states()


def check_ids(module: Any, features: Any) -> None:
    """Check the ids that `module` is about to distribute, if it is a cached module.

    Raises:
        IdOutOfRangeError: an out-of-range id.
    """
    if isinstance(module, CachedModule):
        module.check_ids(features)


def in_batch(module: Any, batch: Any) -> AbstractContextManager[None]:
    """Return a context in which `module`, cached or not, gets ids of `batch`."""
    return module.in_batch(batch) if isinstance(module, CachedModule) else nullcontext()


@contextmanager
def ids_are_checked(module: Any) -> Iterator[None]:
    """Return a context in which `module` distributes ids unchecked, because `check_ids` has checked them."""
    attributes = vars(module)  # modules set attributes slowly
    before, attributes["_ids_are_checked"] = attributes.get("_ids_are_checked", False), True
    try:
        yield
    finally:
        attributes["_ids_are_checked"] = before


@contextmanager
def _no_divisor(module: Any, ctx: Any, features: Any) -> Iterator[None]:
    """Return a context in which TorchRec makes no divisor of row-wise means for a batch without a sample: it would fail
    on this rank, and the others would wait."""
    is_empty = False
    if module._has_mean_pooling_callback:
        jagged = as_keyed_jagged(features)
        is_empty = not jagged.variable_stride_per_key() and jagged.stride() == 0
    if not is_empty:
        yield
        return
    if module._has_uninitialized_input_dist:
        module._init_mean_pooling_callback(list(jagged.keys()), None)
    module._has_mean_pooling_callback = False
    try:
        yield
    finally:
        module._has_mean_pooling_callback, ctx.divisor = True, torch.ones((), device=module._device)


@contextmanager
def _first_batch(module: Any) -> Iterator[None]:
    """Return a context in which TorchRec's check of the first batch, which logs ids that are no rows, knows no table
    that takes any id."""
    configs = module._embedding_bag_configs
    any_id = module._table_of_ids.values()
    module._embedding_bag_configs = [config for config in configs if config.name not in any_id]
    try:
        yield
    finally:
        module._embedding_bag_configs = configs


class CachedShardedEmbeddingBagCollection(CachedModule, ShardedEmbeddingBagCollection):
    """A `ShardedEmbeddingBagCollection` whose cached tables are in host memory behind device caches.

    Attributes:
        feature_order: in which the model reads the pooled rows, where it is one; a `Route` puts them so at once.
    """

    feature_order: list[str] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        spec = kwargs["fused_params"][SPEC_KEY]
        self._has_counter_init = spec.counter_init is not None
        super().__init__(*args, **kwargs)
        self.register_load_state_dict_post_hook(type(self)._fetch_shared_rows)
        self._fetch_shared_rows()  # every rank has written its initial weights
        self._note_features(self._embedding_bag_configs, spec)
        groups = self.sharding_type_to_sharding_infos.values()
        self._sharding_types = [infos[0].param_sharding.sharding_type for infos in groups]

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Check the ids, then run TorchRec's input all-to-all, or that of a mode."""
        is_first = self._has_uninitialized_input_dist and self._table_of_ids
        with _no_divisor(self, ctx, features), _first_batch(self) if is_first else nullcontext():
            awaitable = super().input_dist(ctx, features)
        for number, input_dist in enumerate(self._input_dists):
            if isinstance(input_dist, OwnInput):
                ctx.sharding_contexts[number] = input_dist.take_context()
        return awaitable

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Look up, and run TorchRec's output all-to-all."""
        for context, features in zip(ctx.sharding_contexts, input, strict=True):
            if isinstance(context, SequenceShardingContext):  # of a mode: TorchRec's pooled shardings have others
                context.lengths_after_input_dist = features.lengths().view(-1, features.stride())
        return super().compute_and_output_dist(ctx, input)

    @classmethod
    def create_grouped_sharding_infos(
        cls, module: Any, params: Any, prefix: str, fused_params: dict[str, Any] | None, *rest: Any
    ) -> ShardingInfos:
        fused_params, spec = _without_spec(fused_params)
        infos = super().create_grouped_sharding_infos(module, params, prefix, fused_params, *rest)
        infos = _mark_cached(infos, spec)
        for mode in spec.modes:
            infos = mode.group(infos, spec, is_sequence=False)
        return group_replicated(infos)

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: Any = None,
    ) -> EmbeddingSharding:
        place: dict[str, Any] = {"env": env, "device": device, "qcomm_codecs_registry": qcomm_codecs_registry}
        permuted = {"permute_embeddings": permute_embeddings}
        if isinstance(sharding_infos[0], OwnShardingInfo):
            return sharding_infos[0].make_sharding(sharding_infos, **place)
        if not any(has_spec(info.fused_params) for info in sharding_infos):
            return super().create_embedding_bag_sharding(sharding_infos, **place, **permuted)
        kind = sharding_infos[0].param_sharding.sharding_type
        return POOLED_SHARDINGS[kind](sharding_infos, **place, **(permuted if kind in PERMUTED_SHARDINGS else {}))


class CachedShardedEmbeddingCollection(CachedModule, ShardedEmbeddingCollection):
    """A `ShardedEmbeddingCollection` whose cached tables are in host memory behind device caches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        spec = kwargs["fused_params"][SPEC_KEY]
        self._has_counter_init = spec.counter_init is not None
        super().__init__(*args, **kwargs)
        self._note_features(self._embedding_configs, spec)

    @classmethod
    def create_grouped_sharding_infos(
        cls, module: Any, params: Any, fused_params: dict[str, Any] | None, *rest: Any
    ) -> ShardingInfos:
        fused_params, spec = _without_spec(fused_params)
        infos = _mark_cached(super().create_grouped_sharding_infos(module, params, fused_params, *rest), spec)
        for mode in spec.modes:
            infos = mode.group(infos, spec, is_sequence=True)
        return infos

    @classmethod
    def create_embedding_sharding(
        cls,
        sharding_type: str,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: Any = None,
    ) -> EmbeddingSharding:
        place: dict[str, Any] = {"env": env, "device": device, "qcomm_codecs_registry": qcomm_codecs_registry}
        if isinstance(sharding_infos[0], OwnShardingInfo):
            return sharding_infos[0].make_sharding(sharding_infos, **place)
        if not any(has_spec(info.fused_params) for info in sharding_infos):
            return super().create_embedding_sharding(sharding_type, sharding_infos, **place)
        return SEQUENCE_SHARDINGS[sharding_type](sharding_infos=sharding_infos, **place)


def rows_by_feature(configs: Sequence[BaseEmbeddingConfig]) -> dict[str, tuple[str, int]]:
    """Return for each feature the smallest table that it looks into: name and rows."""
    smallest: dict[str, tuple[str, int]] = {}
    for config in configs:
        for feature in config.feature_names:
            if feature not in smallest or config.num_embeddings < smallest[feature][1]:
                smallest[feature] = (config.name, config.num_embeddings)
    return smallest


def check_bounds(features: KeyedJaggedTensor, rows: Mapping[str, tuple[str, int]]) -> None:
    """Check that every id is a row of its table. Features that no table uses are not checked.

    >>> rows = {"click": ("clicks", 10)}
    >>> check_bounds(KeyedJaggedTensor(["click"], torch.tensor([3, 10]), lengths=torch.tensor([1, 1])), rows)
    Traceback (most recent call last):
    embershard.errors.IdOutOfRangeError: ...table 'clicks', feature 'click': id 10 at position 1 of the batch...

    Raises:
        IdOutOfRangeError: naming table, feature, position and id of the first out-of-range id.
    """
    values = features.values()
    if values.numel() == 0:
        return
    limits = [rows[key][1] if key in rows else 0 for key in features.keys()]  # noqa: SIM118
    if values.is_cpu:
        counts, ends = np.array(features.length_per_key(), np.int64), np.array(limits, np.int64)
        inside = loops.are_rows(values.long().contiguous().numpy(), counts, ends)
    else:
        lengths = torch.tensor(features.length_per_key(), device=values.device)
        limit_of_id = torch.tensor(limits, device=values.device).repeat_interleave(lengths, output_size=values.numel())
        inside = not bool((((values < 0) | (values >= limit_of_id)) & (limit_of_id > 0)).any())
    if inside:
        return
    start = 0
    for key, length in zip(features.keys(), features.length_per_key(), strict=True):
        ids = values[start : start + length]
        start += length
        table, num_rows = rows.get(key, ("", 0))
        bad = ((ids < 0) | (ids >= num_rows)).nonzero().flatten()
        if key in rows and bad.numel():
            position = int(bad[0])
            bag_ends = features[key].lengths().cumsum(0)
            sample = int(torch.searchsorted(bag_ends, position, right=True))
            others = f", nor are {bad.numel() - 1} more" if bad.numel() > 1 else ""
            rank = f"rank {dist.get_rank()}, " if dist.is_initialized() else ""
            raise IdOutOfRangeError(
                f"{rank}table {table!r}, feature {key!r}: id {int(ids[position])} at position {position} "
                f"of the batch (sample {sample}) is not in [0, {num_rows}){others}. "
                "Map ids to rows when reading (modulo or hash), or give the table more rows"
            )


def check_any_ids(features: KeyedJaggedTensor, tables: Mapping[str, str]) -> None:
    """Check the features of tables that take any id.

    >>> missing = KeyedJaggedTensor(["user"], torch.tensor([-5, -(2**63)]), lengths=torch.tensor([1, 1]))
    >>> check_any_ids(missing, {"user": "users"})
    Traceback (most recent call last):
    embershard.errors.IdOutOfRangeError: table 'users', feature 'user': id -9223372036854775808 at position 1 of the...

    Raises:
        IdOutOfRangeError: the one id that is reserved.
    """
    start, is_reserved = 0, features.values() == NO_ID
    if not bool(is_reserved.any()):
        return
    for key, length in zip(features.keys(), features.length_per_key(), strict=True):
        if key in tables and bool(is_reserved[start : start + length].any()):
            position = int(is_reserved[start : start + length].nonzero()[0])
            raise IdOutOfRangeError(
                f"table {tables[key]!r}, feature {key!r}: id {NO_ID} at position {position} of the batch: this "
                "id is reserved for missing values. Leave it out of the sample, or map missing values to another id"
            )
        start += length


def new_sharded_module(cls: type, module: Any, params: Any, env: Any, device: Any, **arguments: Any) -> Any:
    """Construct `cls`, one of the two above, with the arguments that this TorchRec version takes."""
    stock = (
        ShardedEmbeddingBagCollection if issubclass(cls, ShardedEmbeddingBagCollection) else ShardedEmbeddingCollection
    )
    return cls(module, params, env, device=device, **supported(stock, **arguments))
