"""Predicted bytes are those that are allocated."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import DataType

from embershard import CacheConfig
from embershard.cache.config import CachePolicy
from embershard.planning.workload import Workload
from embershard.sharding.memory_model import (
    host_bytes,
    known_host_bytes,
    known_together,
    pool_memory,
    rank_memory,
    resident_bytes,
    step_bytes,
)
from embershard.sharding.run_shape import ReplaySettings, RunShape
from embershard.sharding.sizes import PlacedShard, TableSize, by_pool
from embershard.training.optimizers import EmbeddingOptimizerConfig
from tests.unit.planning.requests import data_of, make_workload
from tests.unit.sharding.pools import OPTIMIZERS, make_pool

SETTINGS = RunShape(1, 1, 100, "cpu", ReplaySettings(CachePolicy("lfu"), lookahead=4, prefetch=2))


def size_of(
    rows: int, dim: int = 8, optimizer: str = "rowwise_adagrad", dtype: Any = "fp32", name: str = "t0"
) -> TableSize:
    return TableSize(name, rows, dim, dtype, *EmbeddingOptimizerConfig(optimizer).state_bytes)


def shard_of(size: TableSize, rows: int | None = None, **changes: Any) -> PlacedShard:
    shard = PlacedShard(size, 0, 0, size.rows if rows is None else rows, size.dim, "table_wise", "cached")
    return dataclasses.replace(shard, **changes)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("policy", "scoring", "by_next_use"), [("lookahead", "lfu", True), ("lfu", "lfu", False), ("lru", "lru", False)]
)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("rows", [(400, 70), (50, 0), (1,)])
def test_a_pool_takes_what_was_predicted(optimizer, policy, scoring, by_next_use, dtype, rows):
    data_type = DataType.FP16 if dtype == "fp16" else DataType.FP32
    pool = make_pool(rows, CacheConfig(ratio=0.5, policy=policy), optimizer=optimizer, data_type=data_type)
    slots = pool.cache.num_slots
    settings = dataclasses.replace(SETTINGS, cache=ReplaySettings(CachePolicy(scoring, by_next_use)))
    shards = [shard_of(size_of(count, 8, optimizer, dtype, f"t{n}")) for n, count in enumerate(rows)]
    memory = pool_memory(shards, settings)
    assert memory.device_bytes(slots) == pool.cache.device_bytes == sum(s.device_bytes for s in pool.stats())
    assert sum(host_bytes(by_pool(shards), settings).values()) == sum(s.host_bytes for s in pool.stats())
    assert host_bytes(by_pool(shards), settings)["rows"] == pool.host.host_bytes
    pool.cache.state.grow(slots + 3)
    pool.slots.resize(slots + 3)
    assert memory.device_bytes(slots + 3) - memory.device_bytes(slots) == 3 * memory.slot_bytes


@pytest.mark.parametrize("kind", ["adam", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb"])
def test_states_of_other_optimizers(kind):
    """As the FBGEMM that is installed lays them out."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(10, 16, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)],
        optimizer=EmbOptimType[kind.upper()],
        weights_precision=SparseType.FP32,
        device=torch.device("meta"),
    )
    (states,) = tables.split_optimizer_states()
    found = sum(state.numel() * state.element_size() for state in states)
    assert found == 10 * size_of(10, 16, kind).optimizer_bytes()


def test_a_gpu_ranks_slots():
    """What that takes is counted on the model of a GPU (tests/unit/gpu_model/test_memory_model.py)."""
    gpu, shard = dataclasses.replace(SETTINGS, device="cuda"), shard_of(size_of(1000))
    on_gpu, on_cpu = pool_memory([shard], gpu), pool_memory([shard], SETTINGS)
    assert on_gpu.slot_bytes - on_cpu.slot_bytes == on_gpu.ranking_bytes == 7
    model = make_workload((1000,)).model
    found = rank_memory(model, [shard], dict.fromkeys(by_pool([shard]), 9), gpu, [40], 1.0).device
    assert found["rankings"] == 10 * 7
    assert found["slots"] == 10 * on_cpu.slot_bytes


def test_slots_fill_a_budget_to_the_byte():
    memory = pool_memory([shard_of(size_of(1000))], SETTINGS)
    for slots in (1, 17, 999):
        exact = memory.device_bytes(slots)
        assert memory.slots_in(exact) == memory.slots_in(exact + memory.slot_bytes - 1) == slots
        assert memory.slots_in(exact - 1) == slots - 1
    assert memory.slots_in(memory.map_bytes) < 1


def test_rows_with_a_part_of_the_columns():
    size = TableSize("t0", 100, 64, "fp16", state_bytes=4, state_bytes_per_column=8)
    shard = shard_of(size, columns=16)
    assert shard.row_bytes == 16 * 2 + 4 + 16 * 8
    assert host_bytes(by_pool([shard]), SETTINGS)["rows"] == 100 * shard.row_bytes
    assert resident_bytes([shard]) == {"device_tables": 0, "replicated": 0}


def test_tables_without_a_cache_take_device_memory_only():
    size = size_of(100, 16)
    whole, copied = shard_of(size, kernel="device"), shard_of(size, kernel="replicated")
    assert resident_bytes([whole, copied]) == {"device_tables": 100 * 68, "replicated": 100 * (68 + 64)}
    assert sum(host_bytes(by_pool([whole, copied]), SETTINGS).values()) == 0


@pytest.mark.parametrize(("scoring", "score_bytes"), [("lru", 0), ("lfu", 400), ("frequency", 400)])
def test_rows_have_scores_unless_their_last_use_decides(scoring, score_bytes):
    settings = dataclasses.replace(SETTINGS, cache=ReplaySettings(CachePolicy(scoring, by_next_use=False)))
    assert host_bytes(by_pool([shard_of(size_of(100))]), settings)["scores"] == score_bytes


def step_bytes_of(workload: Workload, shards: list[PlacedShard]) -> dict[str, int]:
    """All but what the tables themselves take."""
    tables = ("slots", "maps", "device_tables", "replicated")
    return {name: count for name, count in workload.memory(shards, {}).device.items() if name not in tables}


def step(kernel: str, world_size: int, **changes: Any) -> dict[str, int]:
    """Of a rank with a table of 100 rows x 64 and 3 lookups per sample, batches of 100 samples."""
    cache = ReplaySettings(lookahead=4)
    workload = make_workload(
        (100,), world_size=world_size, batch_size=100, cache=cache, data=data_of((100,), 2000, bag_size=3), **changes
    )
    return step_bytes_of(workload, [shard_of(workload.model.tables[0], kernel=kernel)])


def test_buffers_grow_with_ranks_where_one_rank_serves_all():
    """A replicated table sees its own rank's samples, whatever the number of ranks."""
    assert step("replicated", 8) == step("replicated", 1)
    eight, alone, pooled = 800 * (3 * 13 + 4), 100 * 3 * 9, 2 * 64 * 4 * 700  # alone, ids are views of the batch
    assert step("cached", 8)["input_buffers"] - step("cached", 1)["input_buffers"] == (4 + 3) * (eight - alone) + pooled
    assert step("cached", 8)["dense"] == 120_000
    assert step("cached", 8)["activations"] == 200_000


def test_copies_of_hot_rows_and_the_map_of_their_ids():
    assert "hot_rows" not in step("cached", 8)
    assert step("cached", 8, hot_bytes=5000)["hot_rows"] == 5000 + 4 * 100


def test_a_hashed_map_of_hot_ids(monkeypatch):
    monkeypatch.setattr("embershard.extras.hot_cold.memory.map_kind", lambda *_: "hashed")
    row_bytes = make_workload((100,)).model.tables[0].row_bytes()
    assert step("cached", 8, hot_bytes=10 * row_bytes)["hot_rows"] == 10 * row_bytes + 10 * 24


def test_a_block_of_hot_rows_buffers_their_ids():
    """Not a half of them, though it has half of the rows."""
    data = data_of((1000,), 20_000, scattered=False)
    workload = make_workload((1000,), batch_size=100, data=data)
    size = workload.model.tables[0]
    hot, cold = (
        step_bytes_of(workload, [dataclasses.replace(shard_of(size), row_start=start, row_stop=start + 500)])
        for start in (0, 500)
    )
    share = (data.trace.tables["t0"].rows < 500).mean()
    assert share > 0.8
    difference = hot["input_buffers"] - cold["input_buffers"]
    assert difference == pytest.approx((2 * share - 1) * 200 * 13, abs=2)


def test_the_window_is_no_longer_than_the_pipeline_keeps_it(monkeypatch):
    """A window of ids that would take more than the pipeline allows is shorter."""
    long = step("cached", 8)["input_buffers"]
    monkeypatch.setattr("embershard.sharding.memory_model.MAX_KNOWN_BYTES", 1)
    short = step("cached", 8)["input_buffers"]
    assert long - short == (7 - 4) * (800 * (3 * 13 + 4) + 100 * (3 * 8 + 4))  # prefetch + 2 stay


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_long_window_of_large_batches_is_not_cut(world_size, monkeypatch):
    """128 known batches of 65,536 samples per rank, with 26 ids, in tables that all ranks cut by rows."""
    shape = RunShape(world_size, world_size, 65_536, "cuda", ReplaySettings(lookahead=128))
    model = dataclasses.replace(make_workload((1000,) * 26).model, input_bytes_per_sample=14 * 4)
    shards = [dataclasses.replace(shard_of(table), row_stop=1000 // world_size) for table in model.tables]
    of_run = (model, shards, [65_536.0] * 26, shape, 26.0)
    cut = step_bytes(*of_run)["input_buffers"]
    monkeypatch.setattr("embershard.sharding.memory_model.MAX_KNOWN_BYTES", 2**60)
    assert cut == step_bytes(*of_run)["input_buffers"]


def test_a_gpu_keeps_the_copy_of_its_own_batch():
    """Of 100 samples, with 3 ids and 12 bytes of dense features and labels. On a rank alone, ids are views of it."""
    model = dataclasses.replace(make_workload((100,)).model, input_bytes_per_sample=12.0)
    for world_size, of_others in ((1, 3 * 9), (2, 2 * (3 * 13 + 4))):
        shape = RunShape(world_size, 2, 100, "cuda", ReplaySettings(lookahead=4))
        lookups, shard = [300.0 * world_size], shard_of(model.tables[0])
        long, short = (
            step_bytes(model, [shard], lookups, dataclasses.replace(shape, cache=ReplaySettings(lookahead=ahead)), 3.0)
            for ahead in (5, 4)
        )
        assert long["input_buffers"] - short["input_buffers"] == 100 * (3 * 8 + 4 + 12 + of_others)


def test_large_pools_on_a_gpu_are_hashed():
    """A map of 4 bytes per row is what a smaller pool has."""
    gpu = dataclasses.replace(SETTINGS, device="cuda")
    small, large = (pool_memory([shard_of(size_of(rows))], gpu) for rows in (2**27, 2**27 + 1))
    assert (small.map_bytes, large.map_bytes) == (4 * 2**27, 0)
    assert large.slot_bytes - small.slot_bytes == 24
    assert pool_memory([shard_of(size_of(2**27 + 1))], SETTINGS).map_bytes > 0


def test_a_map_that_would_be_hashed_on_a_gpu_is_an_array_on_a_cpu():
    rows = (40_000, 700)
    pool = make_pool(rows, CacheConfig(ratio=0.01, policy="lookahead", slot_map="hashed"))
    memory, array = (
        pool_memory([shard_of(size_of(count, name=f"t{n}")) for n, count in enumerate(rows)], settings)
        for settings in (dataclasses.replace(SETTINGS, slot_map="hashed"), SETTINGS)
    )
    slots = pool.cache.num_slots
    assert memory.device_bytes(slots) == pool.cache.device_bytes == sum(s.device_bytes for s in pool.stats())
    assert memory.device_bytes(slots) == array.device_bytes(slots)


def test_tables_that_exchange_rows_buffer_distinct_rows():
    """Rows and gradients, sent and received, in place of pooled embeddings; the places of all ids of the window."""
    of = make_workload((1000,), batch_size=100, cache=ReplaySettings(lookahead=4), data=data_of((1000,), bag_size=3))
    pooled = shard_of(of.model.tables[0])
    rows = dataclasses.replace(pooled, exchange="rows")
    distinct = 2 * of.distinct_per_rank("t0")  # of each of the two ranks
    assert 100 < distinct < 2 * 300
    known = 4 + 3
    more = known * (300 * 8 - 200 * 4) + known * (distinct - 2 * 300) * 13 + 2 * 64 * 4 * (2 * distinct - 200)
    difference = step_bytes_of(of, [rows])["input_buffers"] - step_bytes_of(of, [pooled])["input_buffers"]
    assert difference == pytest.approx(more, abs=2)


def test_page_locked_memory_comes_in_powers_of_two():
    """Of a known batch in front of a file, on a GPU, the ids: 40 take 320 bytes, for which torch has 512."""
    of = make_workload((100,), world_size=1, batch_size=100, cache=ReplaySettings(lookahead=4))
    shape = dataclasses.replace(of.shape, device="cuda")
    found = known_host_bytes(of.model, [shard_of(of.model.tables[0])], [40.0], shape, 1.0)
    assert found == (4 + 2 + known_together(4)) * (512 + 12 * 40)
