"""`memory_needs`: the memory that a run takes, computed from its settings and its plan before any of it is taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from embershard.cache.config import CacheConfig
from embershard.cache.key_map import map_kind
from embershard.data import schema_of
from embershard.distributed import Ranks
from embershard.sharding import memory_model
from embershard.sharding.memory_model import MemorySettings, PoolMemory
from embershard.sharding.plan import Plan
from embershard.sharding.shards import Pool, TablePlacement, pools_of
from embershard.sharding.sizes import ModelSize, PlacedShard, place_shards
from embershard.training.config import RunConfig
from embershard.training.fit.model_size import model_size, tables_of_run

#: Host memory that training adds to a rank's program, without tables and batches: measured on a CPU.
_RUNTIME_BYTES = 100_000_000
_ID_BYTES, _LENGTH_BYTES, _FLOAT_BYTES = 8, 4, 4
#: Chunks of samples that a source keeps parsed, per thread.
_KEPT_CHUNKS = 3


@dataclass(frozen=True)
class RanksHere:
    """The ranks of a run, and which of them are on this machine.

    Attributes:
        first: the lowest rank on this machine.
    """

    world_size: int
    ranks_per_node: int
    device: Literal["cpu", "cuda"]
    first: int = 0

    @classmethod
    def of(cls, ranks: Ranks) -> RanksHere:
        """Return the ranks of this process's machine."""
        device: Literal["cpu", "cuda"] = "cuda" if ranks.device.type == "cuda" else "cpu"
        return cls(ranks.world_size, ranks.local_world_size, device, ranks.rank - ranks.local_rank)


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes that the ranks of one machine take, by what for.

    Attributes:
        host: host memory. On a CPU it includes what would be on GPUs.
        device: GPU memory of the rank that takes most; empty on a CPU.
        disk: in files in `cache.host_dir`.
        lazy_bytes: the part of `host` that rows take when they are first used.

    >>> MemoryNeeds({"weights": 80, "caches": 20}, {}, disk_bytes=0, lazy_bytes=80).start_bytes
    20
    """

    host: Mapping[str, int]
    device: Mapping[str, int]
    disk_bytes: int
    lazy_bytes: int

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
        """All memory of the fullest GPU."""
        return sum(self.device.values())


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
    model, settings = model_size(config, rows), _settings(config, ranks)
    plan = plan or _even_plan(config, model, ranks)
    is_data_parallel = _is_data_parallel(config, ranks)
    pools = _pool_bytes(model, plan, settings, is_data_parallel) if config.cache.enabled else {}
    shards = place_shards(model, _placed_tables(config, plan), plan)
    lookups = _lookups_per_sample(config)
    host: Counter[str] = Counter()
    device: list[Counter[str]] = []
    for rank in range(ranks.first, ranks.first + ranks.ranks_per_node):
        here = [shard for shard in shards if shard.rank == rank]
        cacheable = here
        if is_data_parallel:
            cacheable = [replace(shard, row_start=0, row_stop=shard.table.rows) for shard in here]
        of_batches = _step_bytes(model, cacheable, lookups, settings, ranks.world_size)
        device.append(Counter(memory_model.resident_bytes(here)) + pools.get(rank, Counter()) + of_batches)
        host += _host_bytes(here, cacheable, settings)
        host["read_ahead"] += _read_ahead_bytes(config, model, sum(lookups.values()), settings)
        host["runtime"] += _RUNTIME_BYTES
    rows_bytes, disk_bytes = host["weights"] + host["optimizer_states"], 0
    if config.cache.host == "mmap":
        disk_bytes, host["weights"], host["optimizer_states"] = rows_bytes, 0, 0
    if ranks.device == "cpu":
        host, device = host + sum(device, Counter()), []
    is_lazy = config.train.init == "counter" and ranks.device == "cpu" and not disk_bytes and not is_data_parallel
    fullest = max(device, key=Counter.total, default=Counter[str]())
    return MemoryNeeds(+host, +fullest, disk_bytes, rows_bytes if is_lazy else 0)


def _is_data_parallel(config: RunConfig, ranks: RanksHere) -> bool:
    """True if every rank caches rows of whole tables, of which the machine has one copy."""
    return config.sharding.mode == "data_parallel" and ranks.world_size > 1


def _host_bytes(
    shards: Sequence[PlacedShard], cacheable: Sequence[PlacedShard], settings: MemorySettings
) -> Counter[str]:
    """Return the bytes of a rank's tables in host memory: rows of `shards`, and scores of those that it may cache."""
    cached = [shard for shard in shards if shard.kernel == "cached"]
    return Counter(
        weights=sum(shard.rows * shard.table.weight_bytes(shard.columns) for shard in cached),
        optimizer_states=sum(shard.rows * shard.table.optimizer_bytes(shard.columns) for shard in cached),
        scores=memory_model.host_bytes(cacheable, settings)["scores"],
    )


def _settings(config: RunConfig, ranks: RanksHere) -> MemorySettings:
    depths, batch_size = config.look_ahead, config.train.rank_batch_size(ranks.world_size)
    known = min(config.lookahead, config.train.max_steps or config.lookahead)  # no batch after the last step
    cache = config.cache if config.cache.enabled else CacheConfig()  # a disabled one's policy is not asked for
    policy = cache.policy_for(config.cache.enabled and config.has_profile)
    hot_bytes = config.sharding.hot_bytes or 0
    return MemorySettings(policy, known, depths.prefetch, batch_size, config.cache.slot_map, ranks.device, hot_bytes)


def _even_plan(config: RunConfig, model: ModelSize, ranks: RanksHere) -> Plan:
    """Return a plan that cuts every table by rows over all ranks."""
    everyone = tuple(range(ranks.world_size))
    tables = tuple(
        TablePlacement(
            table.table, table.rows, table.dim, table.dtype, "row_wise", "cached", everyone, group=table.group
        )
        for table in model.tables
    )
    settings, cache, pools = _settings(config, ranks), config.cache, []
    found = _pools_of(tables, ranks.ranks_per_node, _is_data_parallel(config, ranks))
    module_of = {table.name: table.module for table in tables_of_run(config)}
    elements: Counter[tuple[int, str]] = Counter()  # of all pools of a rank that share a budget: those of a module
    for pool in found:
        elements[pool.rank, module_of[pool.tables[0]]] += pool.rows * pool.dim
    for pool in found:
        if cache.device_bytes is not None:
            of_module = elements[pool.rank, module_of[pool.tables[0]]] or 1
            memory = _pool_memory(model, pool, settings)
            slots = min(pool.rows, memory.share_of(cache.device_bytes, pool.rows * pool.dim, of_module))
        else:
            slots = memory_model.slots_for(pool.rows, (cache.slot_ratio or 1.0) * pool.rows)
        pools.append(pool.with_slots(max(1, slots)))
    place = (ranks.world_size, ranks.ranks_per_node, settings.batch_size, ranks.device)
    return Plan(*place, None, None, {}, tables, tuple(pools))


def _pools_of(tables: Sequence[TablePlacement], ranks_per_node: int, is_data_parallel: bool) -> list[Pool]:
    """Return the pools of all ranks; of data-parallel tables each is one of whole tables."""
    pools = pools_of(tables, ranks_per_node)
    if not is_data_parallel:
        return pools
    rows = {table.table: table.rows for table in tables}
    return [replace(pool, rows=sum(rows[table] for table in pool.tables)) for pool in pools]


def _placed_tables(config: RunConfig, plan: Plan) -> list[TablePlacement]:
    """Return the tables as they are built: without a cache, cached ones are whole on the device."""
    if config.cache.enabled:
        return list(plan.tables)
    return [table.without_cache for table in plan.tables]


def _pool_memory(model: ModelSize, pool: Pool, settings: MemorySettings) -> PoolMemory:
    table = next(table for table in model.tables if table.table == pool.tables[0])
    kind = map_kind(settings.slot_map, pool.rows, settings.device)
    return memory_model.cache_memory(pool.rows, table.row_bytes(pool.dim), settings.policy, kind)


def _pool_bytes(
    model: ModelSize, plan: Plan, settings: MemorySettings, is_data_parallel: bool
) -> dict[int, Counter[str]]:
    """Return the bytes of each rank's caches: "slots" and "maps"."""
    slots_of = {(pool.rank, pool.tables): pool.slots for pool in plan.pools}
    found: dict[int, Counter[str]] = {}
    for pool in _pools_of(plan.tables, plan.ranks_per_node, is_data_parallel):
        memory = _pool_memory(model, pool, settings)
        slots = memory.device_bytes(slots_of[pool.rank, pool.tables]) - memory.map_bytes
        found.setdefault(pool.rank, Counter()).update(slots=slots, maps=memory.map_bytes)
    return found


def _lookups_per_sample(config: RunConfig) -> dict[str, int]:
    """Return the lookups of a sample in each table. Of Parquet files, which do not say, 1 is assumed per feature."""
    data, features = config.data, schema_of(config.data).keys
    sizes = data.synthetic.bag_sizes if data.kind == "synthetic" else ()
    of = dict(zip(features, sizes if len(sizes) > 1 else [*sizes, 1][:1] * len(features), strict=True))
    return {table.name: sum(of[feature] for feature in table.features) for table in tables_of_run(config)}


def _step_bytes(
    model: ModelSize,
    shards: Sequence[PlacedShard],
    lookups: Mapping[str, int],
    settings: MemorySettings,
    world_size: int,
) -> Counter[str]:
    """Return the device memory of a rank for the dense layers and for batches; lookups are spread over all rows. Where
    distinct rows are exchanged, no id of a rank's batch is taken to repeat, and no row to arrive twice from a rank."""
    per_step = []
    for shard in shards:
        of_rank = lookups[shard.table.table] * settings.batch_size
        if shard.exchange == "rows":
            of_rank = min(of_rank, shard.table.rows)
        ranks = 1 if shard.kernel == "replicated" else world_size
        per_step.append(of_rank * ranks * shard.rows / shard.table.rows)
    total = sum(lookups.values())
    return Counter(memory_model.step_bytes(model, shards, per_step, settings, world_size, total))


def _read_ahead_bytes(config: RunConfig, model: ModelSize, lookups: int, settings: MemorySettings) -> int:
    """Return the host memory of a rank for batches that wait, and for parsed chunks of samples."""
    data = config.data
    numbers = schema_of(data).num_dense + 1
    sample_bytes = numbers * _FLOAT_BYTES + lookups * _ID_BYTES + len(model.tables) * _LENGTH_BYTES
    batches = data.prefetch_batches + settings.lookahead
    chunks = _KEPT_CHUNKS * max(1, data.num_workers)
    return (batches * settings.batch_size + chunks * data.chunk_rows) * sample_bytes
