"""Sharders for `DistributedModelParallel(model, sharders=[...], plan=...)`: cached ones, and TorchRec's own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import _remote_device
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingEnv2D
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from embershard.cache.config import CacheConfig
from embershard.cache.ids.config import IdTable
from embershard.errors import ConfigError, ShardingError
from embershard.frequency.profile import FrequencyProfile
from embershard.lazy_names import named
from embershard.sharding.config import ShardingConfig, check_no_size
from embershard.sharding.plan import Plan
from embershard.sharding.shards import Exchange, Shard, empty_group_problem
from embershard.sharding.torchrec.compat import GroupedEnv, global_rank, with_own_columns
from embershard.sharding.torchrec.counter_init import CounterInit
from embershard.sharding.torchrec.inspection import write_initial_weights
from embershard.sharding.torchrec.lookups import POOLED_SHARDINGS, SEQUENCE_SHARDINGS
from embershard.sharding.torchrec.modes.mode import SharderMode, ShardingMode, modes_of
from embershard.sharding.torchrec.modules import (
    CachedShardedEmbeddingBagCollection,
    CachedShardedEmbeddingCollection,
    new_sharded_module,
)
from embershard.sharding.torchrec.spec import CACHED_KERNEL, REPLICATED, REPLICATED_KERNEL, SPEC_KEY, CacheSpec
from embershard.sharding.torchrec.table_arguments import check_home

POOLED_TYPES = [REPLICATED, *POOLED_SHARDINGS]
SEQUENCE_TYPES = [REPLICATED, *SEQUENCE_SHARDINGS]
_NO_REPLICAS = "rows have copies on all ranks already, or are of other ids in each group"


def has_cache(sharder: object) -> bool:
    """Return True for a cached sharder."""
    return isinstance(inner_sharder(sharder), _Cached)


def inner_sharder(sharder: Any) -> Any:
    """Return the sharder of the bags inside of TorchRec's sharder of bags with feature processors; others as they
    are."""
    return sharder._ebc_sharder if isinstance(sharder, FeatureProcessedEmbeddingBagCollectionSharder) else sharder


def bags_of(module: Any) -> Any:
    """Return the collection inside of a collection with feature processors; others as they are."""
    return module._embedding_bag_collection if isinstance(module, FeatureProcessedEmbeddingBagCollection) else module


class _Cached:
    """Settings of the cache, and their way into a sharded module: common to both cached sharders."""

    _STOCK: ClassVar[str]
    _REPLICATED_KERNELS: ClassVar[list[str]] = [EmbeddingComputeKernel.DENSE.value]
    _cache: CacheConfig
    _profile: FrequencyProfile | None
    _plan: Plan | None
    _init_seed: int | None
    _ids: Mapping[str, IdTable]
    _modes: tuple[ShardingMode, ...]

    def _configure(
        self,
        cache: CacheConfig | None,
        profile: FrequencyProfile | None,
        plan: Plan | None,
        init_seed: int | None,
        ids: Mapping[str, IdTable] | None,
        **asked: Any,
    ) -> None:
        if cache is not None and not isinstance(cache, CacheConfig):
            raise ConfigError(f"cache must be a CacheConfig, got {type(cache).__name__}; write CacheConfig(ratio=0.05)")
        self._cache = cache or CacheConfig()
        if not self._cache.enabled:
            raise ConfigError(f"cache.enabled=False has no effect on {type(self).__name__}; use {self._STOCK}")
        self._profile, self._plan, self._init_seed = profile, plan, init_seed
        if plan is not None:
            check_no_size(self._cache)
        self._cache.policy_for(profile is not None)  # raises here rather than in the middle of sharding
        self._cache.check_profile(profile is not None)
        self._ids = dict(ids or {})
        given = {"profile": profile, "plan": plan, "init_seed": init_seed, "ids": self._ids}
        self._modes = modes_of({**given, "exchange": "pooled", "mode": "sharded", "hot_rows": None, **asked})
        refusing = [str(mode) for mode in self._modes if not mode.uses_caches_alone]
        check_home(self._cache, has_seed=init_seed is not None, modes=refusing)

    @property
    def cache(self) -> CacheConfig:
        """The cache's settings."""
        return self._cache

    @property
    def ids(self) -> Mapping[str, IdTable]:
        """Rules of the tables that take any id, by name."""
        return self._ids

    @property
    def fills_host_memory(self) -> bool:
        """True if all rows are written to host memory while the model is built."""
        return self._cache.host == "memory" and self._init_seed is None

    def types_of(self, table: str, num_rows: int) -> Sequence[str] | None:
        """Return the sharding types that a mode asks of a table; None: of this one, none does. See `ShardingMode`."""
        found = (mode.types_of(table, num_rows) for mode in self._modes)
        return next((types for types in found if types is not None), None)

    def drop_profile(self) -> None:
        """Free the profile once the modules are sharded: `DistributedModelParallel` keeps its sharders."""
        self._profile = None

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return the kernels: cached or fused for sharded tables; dense or fused for replicated ones, whose rows the
        dense optimizer or the fused one trains."""
        if sharding_type == REPLICATED:
            return self._REPLICATED_KERNELS
        fused = EmbeddingComputeKernel.FUSED.value
        # TorchRec's planner fails on cached tables on a CPU, for which it has no bandwidth: see `plan_sharding`.
        return [fused] if compute_device_type == "cpu" else [CACHED_KERNEL, fused]

    def _shard(
        self,
        cls: type,
        module: Any,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: Any,
        **rest: Any,
    ) -> Any:
        if isinstance(env, ShardingEnv2D) and not isinstance(env, GroupedEnv):
            raise ShardingError(
                f"{type(self).__name__} under TorchRec's 2D parallelism (DMPCollection): its sync() averages tables by "
                "place, and the same slot of two caches has different rows. Take embershard.GroupedModelParallel, "
                f"which averages the rows that were trained, or {self._STOCK} for the tables {sorted(params)[:5]}"
            )
        device_type = torch.device(device or "cpu").type
        modes = tuple(mode for mode in self._modes if env.world_size > 1 or not mode.needs_ranks)
        check_codecs(self.qcomm_codecs_registry, env, module, params, device_type, modes)  # type: ignore[attr-defined]
        check_groups(module, params, device_type, modes)
        for mode in modes:
            mode.check_module(module, device)
            if isinstance(env, GroupedEnv) and not mode.uses_caches_alone:
                raise ConfigError(f"{mode} with groups of ranks: {_NO_REPLICAS}. Leave one of the two out")
        self._warn_without_cache(params)
        init = None if self._init_seed is None else CounterInit.of_module(module, self._init_seed)
        places = (self._plan, device_type, init, modes, env.rank)
        spec = CacheSpec.make(self._cache, self._profile, params, global_rank(env), *places)
        sharded = new_sharded_module(
            cls,
            module,
            {name: _on_host(param) for name, param in params.items()},
            env,
            device,
            fused_params={**(self.fused_params or {}), SPEC_KEY: spec},  # type: ignore[attr-defined]
            qcomm_codecs_registry=self.qcomm_codecs_registry,  # type: ignore[attr-defined]
            **rest,
        )
        if isinstance(self.qcomm_codecs_registry, ModuleCodecs):  # type: ignore[attr-defined]
            self.qcomm_codecs_registry.put_into(sharded)  # type: ignore[attr-defined]
        if init is not None:
            write_initial_weights(sharded, init)
        return sharded

    def _warn_without_cache(self, params: dict[str, ParameterSharding]) -> None:
        """Warn if TorchRec's plan caches none of a module's tables, unless a plan of ours says so."""
        kernels = {param.compute_kernel for param in params.values()}
        if self._plan is not None or CACHED_KERNEL in kernels:
            return
        warnings.warn(
            f"{type(self).__name__} caches none of the tables {sorted(params)[:5]}: the sharding plan gives them the "
            f"compute kernels {sorted(kernels)}. Make the plan with embershard.plan_sharding, or give tables "
            f"compute_kernel={CACHED_KERNEL!r} in it",
            stacklevel=2,
        )


class CachedEmbeddingBagCollectionSharder(_Cached, EmbeddingBagCollectionSharder):
    """Shards an `EmbeddingBagCollection`; its cached tables are in host memory behind a device cache per rank.

    Args:
        cache: size and policy; default `CacheConfig()`.
        profile: row counts of the data, for the `frequency` policy, the warm-up, and `lfu`'s first counts.
        fused_params, qcomm_codecs_registry: as TorchRec takes them.
        plan: gives every pool its slots, in place of the cache's ratio or byte budget. Give `DistributedModelParallel`
            the plan, too, through `torchrec_plan`.
        init_seed: make every weight a function of this seed, its table, row and column, so that any plan on any number
            of ranks starts from the same weights. Rows of cached tables are made when one of their page is first
            touched, or all by `embershard.flush`, `state_dict` and `load_state_dict`. None: TorchRec's own weights.
        exchange: what travels between ranks: "pooled" embeddings, one per sample and feature, as in TorchRec; or
            "rows", each distinct row once per rank and batch. Rows are pooled where the samples are; their gradients
            are added up there. Weights then differ from TorchRec's by the rounding of sums in another order. Only for
            table-wise, row-wise, column-wise and table-column-wise tables; on one rank nothing travels.
        mode: "sharded": a rank caches rows of its own shards. "data_parallel": every rank caches the same rows of the
            whole tables and looks its own samples up; what travels are ids and the gradients of rows, and `cache.ratio`
            is a share of the whole tables on every rank. All ranks must be on one machine, whose memory holds the
            tables once. On the CPU only, without a plan.
        hot_rows: rows (int64, distinct) by table that every rank gets copies of, for the whole run; the others are in
            their shards. The device memory of the copies is added to the caches'. All tables must be cached.
        ids: rules by table of those that take any 64-bit id, whose `num_embeddings` is the most ids that they have at a
            time; see docs/ids.md. They need `init_seed`, are table-wise or row-wise, and on a CPU.

    >>> sharder = CachedEmbeddingBagCollectionSharder(cache=CacheConfig(ratio=0.015))
    >>> sharder.cache.ratio
    0.015
    """

    _STOCK = "StockEmbeddingBagCollectionSharder"
    _REPLICATED_KERNELS: ClassVar[list[str]] = [EmbeddingComputeKernel.DENSE.value, REPLICATED_KERNEL]

    def __init__(
        self,
        cache: CacheConfig | None = None,
        profile: FrequencyProfile | None = None,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: Any = None,
        plan: Plan | None = None,
        init_seed: int | None = None,
        exchange: Exchange = "pooled",
        mode: SharderMode = "sharded",
        hot_rows: Mapping[str, Tensor] | None = None,
        ids: Mapping[str, IdTable] | None = None,
    ) -> None:
        super().__init__(fused_params=fused_params, qcomm_codecs_registry=qcomm_codecs_registry)
        self._configure(cache, profile, plan, init_seed, ids, exchange=exchange, mode=mode, hot_rows=hot_rows)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return all types that can do the exchange, on every device."""
        return list(next((mode.types for mode in self._modes if mode.types is not None), POOLED_TYPES))

    @property
    def mode_of_split_bags(self) -> str | None:
        """The argument by which a sample's ids of a feature are looked up in several parts; None: in one."""
        return next((str(mode) for mode in self._modes if mode.splits_bags), None)

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> CachedShardedEmbeddingBagCollection:
        """Shard the module. `DistributedModelParallel` calls this."""
        return self._shard(self.sharded_module_type, module, params, env, device, module_fqn=module_fqn)

    @property
    def sharded_module_type(self) -> type[CachedShardedEmbeddingBagCollection]:
        """Type of the sharded module."""
        found = (mode.bags_module for mode in self._modes)
        return next((cls for cls in found if cls is not None), CachedShardedEmbeddingBagCollection)


class CachedEmbeddingCollectionSharder(_Cached, EmbeddingCollectionSharder):
    """Shards an `EmbeddingCollection` (sequence embeddings); arguments as the pooled sharder's.

    >>> CachedEmbeddingCollectionSharder(CacheConfig(policy="lru")).cache.policy
    'lru'

    Args:
        use_index_dedup: as TorchRec takes it. Only on GPUs: FBGEMM has no CPU kernel for it.
    """

    _STOCK = "StockEmbeddingCollectionSharder"

    def __init__(
        self,
        cache: CacheConfig | None = None,
        profile: FrequencyProfile | None = None,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: Any = None,
        use_index_dedup: bool = False,
        plan: Plan | None = None,
        init_seed: int | None = None,
        ids: Mapping[str, IdTable] | None = None,
    ) -> None:
        super().__init__(
            fused_params=fused_params,
            qcomm_codecs_registry=qcomm_codecs_registry,
            use_index_dedup=use_index_dedup,
        )
        self._configure(cache, profile, plan, init_seed, ids)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return TorchRec's types for sequences."""
        return SEQUENCE_TYPES

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> CachedShardedEmbeddingCollection:
        """Shard the module. `DistributedModelParallel` calls this.

        Raises:
            ConfigError: `use_index_dedup` on a CPU.
        """
        if self._use_index_dedup and torch.device(device or "cpu").type == "cpu":
            raise ConfigError(
                "use_index_dedup=True needs a GPU: FBGEMM has no CPU kernel that finds a batch's distinct ids "
                "(fbgemm::jagged_unique_indices), so the first forward would fail. Leave it out: the embeddings are "
                "the same"
            )
        return self._shard(
            CachedShardedEmbeddingCollection,
            module,
            params,
            env,
            device,
            module_fqn=module_fqn,
            use_index_dedup=self._use_index_dedup,
        )

    @property
    def sharded_module_type(self) -> type[CachedShardedEmbeddingCollection]:
        """Type of the sharded module."""
        return CachedShardedEmbeddingCollection


def _on_host(param: ParameterSharding) -> ParameterSharding:
    """Place a cached table's shards in host memory, wherever its slots are: ShardedTensor checks the placement."""
    if param.compute_kernel != CACHED_KERNEL or param.sharding_spec is None:
        return param
    param = copy.deepcopy(param)
    for shard in param.sharding_spec.shards:
        shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")
    return param


class _FromSeed:
    """Makes the initial weights of a sharded module from a seed, if there is one. Stands before one of TorchRec's
    sharders."""

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: Any = None,
        init_seed: int | None = None,
    ) -> None:
        super().__init__(fused_params=fused_params, qcomm_codecs_registry=qcomm_codecs_registry)  # type: ignore[call-arg]
        self._init_seed = init_seed

    def shard(self, module: Any, params: Any, env: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Shard the module. `DistributedModelParallel` calls this.

        Raises:
            ShardingError: on a CPU, a rank has no row of some tables, which ends a process in FBGEMM.
            ConfigError: the registry has types that TorchRec replaces, or that fail in the first batch.
        """
        device_type = torch.device(device or "cpu").type
        check_codecs(self.qcomm_codecs_registry, env, module, params, device_type)  # type: ignore[attr-defined]
        check_groups(module, params, device_type)
        sharded = super().shard(module, params, env, device, *args, **kwargs)  # type: ignore[misc]
        if isinstance(self.qcomm_codecs_registry, ModuleCodecs):  # type: ignore[attr-defined]
            self.qcomm_codecs_registry.put_into(sharded)  # type: ignore[attr-defined]
        before = sharded._register_load_state_dict_pre_hook(with_own_columns, with_module=True)
        sharded._load_state_dict_pre_hooks.move_to_end(before.id, last=False)
        if self._init_seed is not None:
            write_initial_weights(sharded, CounterInit.of_module(module, self._init_seed))
        return sharded


class StockEmbeddingBagCollectionSharder(_FromSeed, EmbeddingBagCollectionSharder):
    """TorchRec's sharder with all sharding types on a CPU, too: the uncached side of every comparison.

    TorchRec hides row-wise, table-row-wise and grid sharding on a CPU, though they work there.

    >>> "row_wise" in StockEmbeddingBagCollectionSharder().sharding_types("cpu")
    True

    Args:
        fused_params, qcomm_codecs_registry: as TorchRec takes them.
        init_seed: as for :class:`CachedEmbeddingBagCollectionSharder`, to start from the same weights.
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return all types, on every device."""
        return POOLED_TYPES


class StockEmbeddingCollectionSharder(_FromSeed, EmbeddingCollectionSharder):
    """The same for sequence embeddings: TorchRec's sharder, with the initial weights of the cached one.

    >>> "row_wise" in StockEmbeddingCollectionSharder().sharding_types("cpu")
    True

    Args:
        fused_params, qcomm_codecs_registry: as TorchRec takes them.
        init_seed: as for :class:`CachedEmbeddingCollectionSharder`, to start from the same weights.
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return TorchRec's types for sequences, on every device."""
        return SEQUENCE_TYPES


def check_groups(
    module: Any,
    params: Mapping[str, ParameterSharding],
    device_type: str,
    modes: Sequence[ShardingMode] = (),
) -> None:
    """Check a plan of a module's tables, made by anybody. A cache may have no row.

    Args:
        module: with embedding configs.
        params: by table.
        device_type: of the training. On a GPU there is no such limit.
        modes: of the sharder.

    Raises:
        ShardingError: on a CPU, a rank has no row of a group that has no cache. It would end with a corrupt heap, or
            with "weights[0] must be a GPU or MTIA tensor". On every rank.
    """
    module = bags_of(module)
    configs = module.embedding_bag_configs() if hasattr(module, "embedding_bag_configs") else module.embedding_configs()
    tables = []
    for config in configs if device_type == "cpu" else ():
        param = params.get(config.name)
        spec: Any = None if param is None or param.compute_kernel == CACHED_KERNEL else param.sharding_spec
        if param is None or spec is None:
            continue
        shards = [
            Shard(config.name, shard.placement.rank(), *shard.shard_sizes, *shard.shard_offsets)
            for shard in spec.shards
        ]
        columns = str(shards[0].columns) if any(mode.are_by_columns(config.name) for mode in modes) else ""
        pooling = str(getattr(config, "pooling", ""))
        tables.append(((param.sharding_type, param.compute_kernel, str(config.data_type), pooling, columns), shards))
    if problem := empty_group_problem(tables):
        raise ShardingError(
            f"{problem}, and FBGEMM cannot train that on a CPU. Place them table_wise "
            '(ParameterConstraints(sharding_types=["table_wise"])), use fewer ranks, or cache them: a cached sharder '
            "trains them on any number of ranks"
        )


class ModuleCodecs(dict[str, Any]):
    """A `qcomm_codecs_registry` whose codecs depend on the tables; our sharders put them into a module's exchanges."""

    def put_into(self, sharded: Any) -> None:
        """Let the exchanges of a sharded module use them."""
        raise NotImplementedError


def check_codecs(registry: Any, env: ShardingEnv, *of_module: Any) -> None:
    """Check codecs of TorchRec's that send bytes, before anything is built: some it replaces, and some fail."""
    if env.world_size == 1 or registry is None or isinstance(registry, ModuleCodecs):
        return
    codecs = [codec for pair in registry.values() for codec in (pair.forward, pair.backward)]
    if any(codec.quantized_dtype == torch.uint8 for codec in codecs):
        named("embershard.extras.wire_types.stock_codecs:check")(registry, *of_module)


def comm_codecs(config: ShardingConfig, device: torch.device) -> Any:
    """Return a sharder's `qcomm_codecs_registry`; None where everything travels as fp32.

    Raises:
        ConfigError: the device's process group cannot send this type.
    """
    for name in ("forward_dtype", "backward_dtype"):
        if device.type == "cpu" and getattr(config, name) == "bf16":  # TorchRec would fall back to fp16
            raise ConfigError(
                f'sharding.{name}: got "bf16", which gloo does not send: TorchRec would round to fp16. On the CPU use '
                '"fp16", "fp32", "int8" or "fp8".'
            )
    if {config.forward_dtype, config.backward_dtype} & {"int8", "fp8"}:
        return named("embershard.extras.wire_types:WireTypes")(config.forward_dtype, config.backward_dtype)
    precisions = QCommsConfig(CommType(config.forward_dtype), CommType(config.backward_dtype))
    return get_qcomm_codecs_registry(precisions, device=device)
