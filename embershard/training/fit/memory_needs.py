"""`memory_needs`: the memory that a run takes, computed from its settings and its plan before any of it is taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from embershard.cache.config import CacheConfig
from embershard.cache.rows.copies import BLOCK_BYTES
from embershard.cache.rows.memory import pinned_bytes
from embershard.data import schema_of
from embershard.distributed import Ranks
from embershard.sharding.home_sizes import home_sizes
from embershard.sharding.memory_model import (
    known_host_bytes,
    planned_slots,
    pool_memory,
    rank_memory,
    slots_without_plan,
)
from embershard.sharding.plan import Plan
from embershard.sharding.run_shape import ReplaySettings, RunShape
from embershard.sharding.shards import PoolKey, TablePlacement
from embershard.sharding.sizes import ModelSize, PlacedShard, by_pool, by_rank, place_shards
from embershard.training.config import RunConfig
from embershard.training.fit.model_size import model_size, tables_of_run

#: Host memory that training adds to a rank's program, without tables and batches: measured on a CPU.
_RUNTIME_BYTES = 100_000_000
_ID_BYTES, _LENGTH_BYTES, _FLOAT_BYTES = 8, 4, 4
#: On a GPU: rows of a publication on their way to host memory, twice a block, and what finds them.
_PUBLICATION_BYTES = 3 * BLOCK_BYTES
_OF_PUBLISHING = ("marks", "publication")
#: Chunks of samples that a source keeps parsed, per thread.
_KEPT_CHUNKS = 3


@dataclass(frozen=True)
class RanksHere:
    """The ranks of a run, and which of them are on this machine: known before the settings, which make a `RunShape` of
    it that is the same on all machines.

    Attributes:
        first: the lowest rank on this machine.
        own: of these, the one that asks, from 0; None: none of them.
    """

    world_size: int
    ranks_per_node: int
    device: Literal["cpu", "cuda"]
    first: int = 0
    own: int | None = None

    @classmethod
    def of(cls, ranks: Ranks) -> RanksHere:
        """Return the ranks of this process's machine."""
        device: Literal["cpu", "cuda"] = "cuda" if ranks.device.type == "cuda" else "cpu"
        return cls(
            ranks.world_size, ranks.local_world_size, device, ranks.rank - ranks.local_rank, own=ranks.local_rank
        )


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes that the ranks of one machine take, by what for.

    Attributes:
        host: host memory. On a CPU it includes what would be on GPUs.
        device: GPU memory of the rank that asks, or of the one that takes most; empty on a CPU.
        disk: in files in `cache.host_dir`.
        lazy_bytes: the part of `host` that rows take when they are first used.
        by_rank: what each rank here takes where its tables' device is, [ranks here]; on a CPU a part of `host`.

    >>> MemoryNeeds({"weights": 80, "caches": 20}, {}, disk_bytes=0, lazy_bytes=80).start_bytes
    20
    """

    host: Mapping[str, int]
    device: Mapping[str, int]
    disk_bytes: int
    lazy_bytes: int
    by_rank: tuple[Mapping[str, int], ...] = ()

    @property
    def host_bytes(self) -> int:
        """All host memory."""
        return sum(self.host.values())

    @property
    def start_bytes(self) -> int:
        """Host memory without the rows that are made when they are first used."""
        return self.host_bytes - self.lazy_bytes

    @property
    def device_bytes(self) -> int:
        """All memory of that GPU."""
        return sum(self.device.values())

    @property
    def bytes_by_rank(self) -> list[int]:
        """What each rank here takes on its device."""
        return [sum(parts.values()) for parts in self.by_rank]


def memory_needs(config: RunConfig, rows: Mapping[str, int], ranks: RanksHere, plan: Plan | None) -> MemoryNeeds:
    """Return the memory that a run takes on this machine, beyond that of programs which have just started. Left out: a
    profile until the caches are warm, 16 bytes for each row that occurs in it.

    Args:
        rows: of each table, by name.
        plan: places the tables. None: they are taken to be cut evenly by rows, which is the least that the fullest rank
            can take; the sum over the ranks of one machine does not depend on it.

    >>> from embershard.training.fit.model_size import table_rows
    >>> ranks = RanksHere(world_size=2, ranks_per_node=2, device="cpu")
    >>> memory_needs(RunConfig(), table_rows(RunConfig()), ranks, None).host["weights"]
    21609472
    """
    model, shape = model_size(config, rows), _shape(config, ranks)
    has_one_copy = config.sharding.mode == "data_parallel" and ranks.world_size > 1
    per_sample = sum((lookups := _lookups_per_sample(config)).values())
    host, device = Counter[str](), list[Counter[str]]()
    for here in _shards(config, model, shape, plan)[ranks.first : ranks.first + ranks.ranks_per_node]:
        # One copy is of whole tables, on this machine, and every rank caches rows of them.
        cacheable = [replace(each, row_start=0, row_stop=each.table.rows) for each in here] if has_one_copy else here
        slots = _slots(config, cacheable, shape) if plan is None else planned_slots(plan.pools, by_pool(cacheable))
        arriving = [_arriving(shard, lookups[shard.table.table], shape) for shard in cacheable]
        memory = rank_memory(model, cacheable, slots, shape, arriving, per_sample)
        readers = config.publish.folder is not None, config.checkpoint.full_every > 1, config.sharding.groups > 1
        marks = sum(readers) * sum(shard.rows for shard in cacheable if shard.kernel == "cached")
        device.append(Counter({**memory.device, "marks": marks}))
        if config.publish.folder is not None:
            device[-1]["publication"] = _PUBLICATION_BYTES if ranks.device == "cuda" else 0
            host["compared"] += _compared_bytes(here, is_first=not ranks.first and len(device) == 1)
        cached = [shard for shard in here if shard.kernel == "cached"]
        host["optimizer_states"] += (states := _state_bytes(cached))
        host["weights"] += sum(shard.host_bytes for shard in cached) - states
        host.update({name: count for name, count in memory.host.items() if name != "rows"})
        host["read_ahead"] += _read_ahead_bytes(config, model, per_sample, shape)
        if shape.home.is_partial:
            host["rows_in_memory"] += memory.host["rows"]
            host["known_batches"] += known_host_bytes(model, here, arriving, shape, per_sample)
        host["runtime"] += _RUNTIME_BYTES
    taken = zip(_predicted(config, ranks, plan) or device, device, strict=True)
    by_device = tuple(+(each | Counter({name: own[name] for name in _OF_PUBLISHING})) for each, own in taken)
    rows_bytes, disk_bytes = host["weights"] + host["optimizer_states"], 0
    if config.cache.host != "memory":  # what the system keeps of mapped files is its own choice
        disk_bytes, host["weights"], host["optimizer_states"] = rows_bytes, 0, 0
    if ranks.device == "cpu":
        host, device = host + sum(device, Counter()), []
    is_lazy = config.train.init == "counter" and ranks.device == "cpu" and not disk_bytes and not has_one_copy
    asking = device if ranks.own is None else device[ranks.own : ranks.own + 1]
    of_gpu = max(asking, key=Counter.total, default=Counter[str]())
    return MemoryNeeds(+host, +of_gpu, disk_bytes, rows_bytes if is_lazy else 0, by_device)


def _predicted(config: RunConfig, ranks: RanksHere, plan: Plan | None) -> list[Counter[str]]:
    """Return the device memory of each rank here by its plan, which knows how often the data look rows up; empty where
    the plan was edited, or assumed other settings."""
    if plan is None or plan.prediction is None or not config.cache.enabled:
        return []
    if plan.other_settings(config.predicted_from(ranks.device, ranks.world_size)):
        return []
    here = (plan.prediction.ranks * config.sharding.groups)[ranks.first : ranks.first + ranks.ranks_per_node]
    return [Counter(rank.device_bytes) for rank in here]


def _shape(config: RunConfig, ranks: RanksHere) -> RunShape:
    depths, cache = config.look_ahead, config.cache if config.cache.enabled else CacheConfig()
    policy = cache.policy_for(config.cache.enabled and config.has_profile)  # a disabled one's is not asked for
    return RunShape(
        *config.sharding.group_shape(ranks.world_size, ranks.ranks_per_node),
        config.train.rank_batch_size(ranks.world_size),
        ranks.device,
        ReplaySettings(policy, _known(config), depths.prefetch),
        slot_map=config.cache.slot_map,
        mode_memory=config.sharding.mode_memory,
        accumulate=config.train.accumulate,
        home=home_sizes(config.cache),
    )


def _known(config: RunConfig) -> int:
    return min(config.lookahead, config.train.max_steps or config.lookahead)  # no batch after the last step


def _shards(config: RunConfig, model: ModelSize, shape: RunShape, plan: Plan | None) -> list[list[PlacedShard]]:
    tables = _cut_evenly(model, shape) if plan is None else plan.tables
    if not config.cache.enabled:  # cached tables are built whole on the device
        tables = [table.without_cache for table in tables]
    layout = plan or shape
    return by_rank(place_shards(model, tables, layout), layout.world_size) * config.sharding.groups


def _cut_evenly(model: ModelSize, shape: RunShape) -> list[TablePlacement]:
    everyone = tuple(range(shape.world_size))
    return [
        TablePlacement(
            table.table, table.rows, table.dim, table.dtype, "row_wise", "cached", everyone, group=table.group
        )
        for table in model.tables
    ]


def _slots(config: RunConfig, shards: Sequence[PlacedShard], shape: RunShape) -> dict[PoolKey, int]:
    """Return the slots of a rank's pools without a plan. The pools of a module share `cache.device_bytes`."""
    module_of = {table.name: table.module for table in tables_of_run(config)}
    pools = by_pool(shards)
    elements = {key: sum(shard.rows * shard.columns for shard in members) for key, members in pools.items()}
    modules = {key: module_of[members[0].table.table] for key, members in pools.items()}
    of_module: Counter[str] = Counter()
    for key, module in modules.items():
        of_module[module] += elements[key]
    return {
        key: slots_without_plan(config.cache, pool_memory(members, shape), elements[key], of_module[modules[key]] or 1)
        for key, members in pools.items()
    }


def _state_bytes(shards: Sequence[PlacedShard]) -> int:
    return sum(shard.rows * shard.table.optimizer_bytes(shard.columns) for shard in shards)


def _compared_bytes(shards: Sequence[PlacedShard], is_first: bool) -> int:
    """Return the host memory of a rank for copies of tables outside of caches, with which they are compared to know
    which of their rows were trained. Those that all ranks have are compared by the first."""
    return sum(
        shard.rows * shard.table.weight_bytes(shard.columns)
        for shard in shards
        if shard.kernel == "device" or (shard.kernel == "replicated" and is_first)
    )


def _arriving(shard: PlacedShard, lookups: int, shape: RunShape) -> float:
    """Return the ids that arrive at a shard in a step; those of a sample are spread over all rows. Where distinct rows
    are exchanged, no id of a rank's batch is taken to repeat, and no row to arrive twice from a rank."""
    of_rank = lookups * shape.batch_size
    if shard.exchange == "rows":
        of_rank = min(of_rank, shard.table.rows)
    ranks = 1 if shard.kernel == "replicated" else shape.world_size
    return of_rank * ranks * shard.rows / shard.table.rows


def _lookups_per_sample(config: RunConfig) -> dict[str, int]:
    """Return the lookups of a sample in each table. Of Parquet files, which do not say, 1 is assumed per feature."""
    data, features = config.data, schema_of(config.data).keys
    sizes = data.synthetic.bag_sizes if data.kind == "synthetic" else ()
    of = dict(zip(features, sizes if len(sizes) > 1 else [*sizes, 1][:1] * len(features), strict=True))
    return {table.name: sum(of[feature] for feature in table.features) for table in tables_of_run(config)}


def _read_ahead_bytes(config: RunConfig, model: ModelSize, lookups: int, shape: RunShape) -> int:
    """Return the host memory of a rank for batches that wait, and for parsed chunks of samples."""
    data = config.data
    numbers = schema_of(data).num_dense + 1
    parts = [numbers * _FLOAT_BYTES, lookups * _ID_BYTES, len(model.tables) * _LENGTH_BYTES]  # of a sample
    batch_bytes = [part * shape.batch_size for part in parts]
    if shape.device == "cuda":  # page-locked
        batch_bytes = [pinned_bytes(each) for each in batch_bytes]
    batches = data.prefetch_batches + _known(config)
    chunks = _KEPT_CHUNKS * max(1, data.num_workers)
    return batches * sum(batch_bytes) + chunks * data.chunk_rows * sum(parts)
