"""Shardings of tables of ids without a bound: a rank has whole buckets, and gets the ids of these.

Table-wise tables are exchanged as ever, with others, and looked up apart. Of row-wise ones, TorchRec's input all-to-all
takes the bucket of a mixed id in place of its row, and keeps the id.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import ShardedEmbeddingTable, ShardingType
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.cache.ids.config import IdTable
from embershard.cache.ids.id_map import mixed
from embershard.cache.row_cache import RowCache
from embershard.errors import ConfigError, ShardingError
from embershard.sharding.torchrec.ids.id_states import IdStates
from embershard.sharding.torchrec.ids.id_tables import PoolIdMaps
from embershard.sharding.torchrec.lookups import POOLED_SHARDINGS, SEQUENCE_SHARDINGS, OwnShardingInfo
from embershard.sharding.torchrec.modes.mode import Arguments, ShardingInfos, ShardingMode
from embershard.sharding.torchrec.spec import CACHED_KERNEL, RAW_IDS_KEY

_TABLE_WISE, _ROW_WISE = ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value
#: TorchRec's types that give a rank whole buckets.
ID_SHARDINGS = (_TABLE_WISE, _ROW_WISE)


def mixed_ids(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return features whose ids are mixed."""
    found = copy.copy(features)
    found._values, found._jt_dict = torch.from_numpy(mixed(features.values().numpy())), None
    return found


class _MixedByBuckets(RwSparseFeaturesDist):
    def forward(self, sparse_features: KeyedJaggedTensor) -> Any:
        return super().forward(mixed_ids(sparse_features))


class _ByBuckets:
    """Override of TorchRec's row-wise shardings: ids are mixed, and go to the ranks of their buckets."""

    _is_sequence = False

    def create_input_dist(self, device: torch.device | None = None) -> RwSparseFeaturesDist:
        rules: Mapping[str, IdTable] = self._rules  # type: ignore[attr-defined]
        buckets = [
            rules[table.name].buckets_of(table.name, table.num_embeddings).num_buckets
            for table in self.embedding_tables()  # type: ignore[attr-defined]
            for _ in table.feature_names
        ]
        return _MixedByBuckets(
            pg=self._pg,  # type: ignore[attr-defined]
            num_features=len(buckets),
            feature_hash_sizes=[0] * len(buckets),  # a block of 0 rows: any id
            feature_total_num_buckets=buckets,
            device=device if device is not None else self._device,  # type: ignore[attr-defined]
            is_sequence=self._is_sequence,
            has_feature_processor=self._has_feature_processor,  # type: ignore[attr-defined]
            need_pos=self._need_pos,  # type: ignore[attr-defined]
            keep_original_indices=True,
        )


def _by_buckets(cls: type, is_sequence: bool) -> type:
    return type(f"{cls.__name__.lstrip('_')}ByBuckets", (_ByBuckets, cls), {"_is_sequence": is_sequence})


_POOLED = _by_buckets(POOLED_SHARDINGS[_ROW_WISE], is_sequence=False)
_SEQUENCE = _by_buckets(SEQUENCE_SHARDINGS[_ROW_WISE], is_sequence=True)


class IdShardingInfo(OwnShardingInfo):
    """A row-wise table of ids without a bound."""

    rules: Mapping[str, IdTable]
    is_sequence: bool

    @staticmethod
    def make_sharding(infos: list[EmbeddingShardingInfo], **place: Any) -> EmbeddingSharding[Any, Any, Any, Any]:
        """Return the sharding of one of the groups that :func:`group_ids` made."""
        info = infos[0]
        assert isinstance(info, IdShardingInfo)
        cls = _SEQUENCE if info.is_sequence else _POOLED
        sharding = cls(sharding_infos=infos, **place)
        sharding._rules = info.rules
        return sharding  # type: ignore[no-any-return]


def group_ids(
    infos: dict[str, list[EmbeddingShardingInfo]], rules: Mapping[str, IdTable], is_sequence: bool = False
) -> dict[str, list[EmbeddingShardingInfo]]:
    """Take the row-wise tables that have `rules` out of the groups by sharding type, into groups of their own.
    Table-wise ones stay in theirs, where an entry in `fused_params` gives them a pool of their own.

    Raises:
        ConfigError: a table is sharded in another way, has no cache, or shares a feature with a table of rows.
        ShardingError: a shard has no whole buckets.
    """
    grouped: dict[str, list[EmbeddingShardingInfo]] = {}
    for kind, members in infos.items():
        for info in members:
            if info.embedding_config.name not in rules:
                grouped.setdefault(kind, []).append(info)
                continue
            _check(info, rules[info.embedding_config.name])
            if kind == _TABLE_WISE:
                info.fused_params = {**(info.fused_params or {}), RAW_IDS_KEY: True}
                grouped.setdefault(kind, []).append(info)
                continue
            own = IdShardingInfo(**vars(info))
            own.rules, own.is_sequence = rules, is_sequence
            grouped.setdefault(f"{kind}, ids", []).append(own)
    return grouped


def _check(info: EmbeddingShardingInfo, rules: IdTable) -> None:
    name, param = info.embedding_config.name, info.param_sharding
    if param.sharding_type not in ID_SHARDINGS:
        raise ConfigError(
            f"table {name!r} takes any id and is sharded {param.sharding_type}; needed one of "
            f"{', '.join(ID_SHARDINGS)}. Give it one of these: ParameterConstraints(sharding_types=[...])"
        )
    if param.compute_kernel != CACHED_KERNEL:
        raise ConfigError(
            f"table {name!r} takes any id and has the compute kernel {param.compute_kernel!r}; needed a cache, which "
            f"is {CACHED_KERNEL!r}: make the plan with embershard.plan_sharding"
        )
    buckets = rules.buckets_of(name, info.embedding_config.num_embeddings)
    sharding_spec: Any = param.sharding_spec
    starts = [shard.shard_offsets[0] for shard in sharding_spec.shards]
    if param.sharding_type == _ROW_WISE and (
        buckets.num_buckets % len(starts) or any(start % buckets.rows for start in starts)
    ):
        fitting = [ranks for ranks in range(1, buckets.num_buckets + 1) if buckets.num_buckets % ranks == 0]
        raise ShardingError(
            f"table {name!r} has {buckets.num_buckets} buckets of {buckets.rows} rows, and {len(starts)} ranks; needed "
            f"as many whole buckets on every rank. Use {', '.join(map(str, fitting[:16]))} ranks, place it table_wise, "
            "or start anew with another number of buckets (IdTable(buckets=...))"
        )


class IdMode(ShardingMode):
    """`ids`: tables that take any id."""

    def __init__(self, arguments: Arguments) -> None:
        self._rules: Mapping[str, IdTable] = arguments["ids"]
        for table, rules in self._rules.items():
            if not isinstance(rules, IdTable):
                raise ConfigError(f"ids of table {table!r}: got {rules!r}, needed an IdTable; write IdTable(...)")
        if arguments["init_seed"] is None:
            raise ConfigError(
                "ids without init_seed: a row that gets another id draws its weights by seed and id. Set it"
            )
        if arguments["profile"] is not None:
            raise ConfigError(
                "ids with a profile, which is about rows: those of ids that come and go have no counts yet. Remove one "
                "of the two"
            )

    def __str__(self) -> str:
        return "ids"

    def check_beside(self, others: Sequence[ShardingMode]) -> None:
        for other in others:
            if other.splits_bags:
                raise ConfigError(
                    f"ids with {other}: which row an id has is known to its owner alone. Remove one of the two"
                )

    def check_module(self, module: Any, device: Any) -> None:
        if getattr(module, "need_indices", lambda: False)():
            raise ConfigError(
                "ids with need_indices=True: the ids that come back would be mixed ones. Remove one of the two"
            )
        if torch.device(device or "cpu").type != "cpu":
            raise ConfigError(
                f"ids on {device}: tables of ids are cached on a CPU only so far. Remove ids, or use a CPU"
            )

    def types_of(self, table: str, num_rows: int) -> Sequence[str] | None:
        if table not in self._rules:
            return None
        self._rules[table].buckets_of(table, num_rows)
        return ID_SHARDINGS

    def group(self, infos: ShardingInfos, spec: Any, is_sequence: bool) -> ShardingInfos:
        return group_ids(infos, self._rules, is_sequence)

    def gives_rows(self, table: str) -> bool:
        return table in self._rules

    def pool_keys(
        self, spec: Any, tables: Sequence[ShardedEmbeddingTable], cache: RowCache, table_of_feature: Sequence[int]
    ) -> PoolIdMaps:
        assert spec.counter_init is not None, "reinitialised rows draw from a counter"
        return PoolIdMaps.of_tables(self._rules, spec.counter_init.seed, tables, cache, table_of_feature)

    def note_module(self, module: Any, configs: Sequence[Any]) -> None:
        tables = {
            config.name: (rules, rules.buckets_of(config.name, config.num_embeddings))
            for config in configs
            if (rules := self._rules.get(config.name)) is not None
        }
        if tables:
            module.add_states(IdStates(module, tables))
