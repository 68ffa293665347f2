"""TorchRec's own planner works with the statistics of a profile."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.proposers import EmbeddingOffloadScaleupProposer
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import CacheStatistics

from embershard import FrequencyProfile
from embershard.frequency.collect import Collector, count_part
from embershard.sharding.torchrec.planner.torchrec_planner import cache_params_from

ROWS = {"skewed": 100_000, "uniform": 100_000}


@pytest.fixture(scope="module")
def profile() -> FrequencyProfile:
    random = np.random.default_rng(0)
    rows = [np.floor(100_000 ** random.random(50_000)).astype(np.int64) - 1, random.integers(0, 100_000, 50_000)]
    collector = Collector(ROWS, max_lookups=10**6, memory_bytes=1 << 30)
    collector.add(count_part(list(ROWS.values()), rows, [1, 1], 50_000))
    found = collector.finish()
    return FrequencyProfile.of_sparse(ROWS, found.counts, 1, found.statistics)


def test_the_terms_of_torchrec(profile):
    params = {table: cache_params_from(profile, table, global_batch_size=4096) for table in ROWS}
    skewed, uniform = (params[table].stats for table in ROWS)
    assert isinstance(skewed, CacheStatistics)
    assert (skewed.expected_miss_rate(0.0), skewed.expected_miss_rate(1.0)) == (1.0, 0.0)
    assert 0 < skewed.cacheability < uniform.cacheability < 1
    assert skewed.expected_lookups < uniform.expected_lookups < 4096
    assert params["uniform"].load_factor == pytest.approx(uniform.expected_lookups / 100_000)
    assert cache_params_from(profile, "skewed", global_batch_size=64, load_factor=0.3).load_factor == 0.3


@pytest.mark.parametrize("knows", [True, False])
def test_torchrec_s_scale_up_gives_the_room_to_the_table_that_needs_it(profile, knows):
    factors = {table: 1.0 if factor is None else factor for table, factor in scaled_up(profile, knows).items()}
    if knows:
        assert 0.05 <= factors["skewed"] < factors["uniform"]
    else:
        assert set(factors.values()) == {0.05}, "without statistics TorchRec scales nothing"


def scaled_up(profile, knows):
    """Load factors in TorchRec's plan, where both tables start with 0.05."""
    tables = [
        EmbeddingBagConfig(name=table, num_embeddings=rows, embedding_dim=64, feature_names=[f"f_{table}"])
        for table, rows in ROWS.items()
    ]
    params = {table: cache_params_from(profile, table, global_batch_size=4096, load_factor=0.05) for table in ROWS}
    if not knows:
        params = {table: dataclasses.replace(each, stats=None) for table, each in params.items()}
    constraints = {
        table: ParameterConstraints(
            sharding_types=["table_wise"], compute_kernels=["fused_uvm_caching"], cache_params=params[table]
        )
        for table in ROWS
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cuda", hbm_cap=60 << 20),
        batch_size=4096,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints=constraints,
        proposer=[EmbeddingOffloadScaleupProposer()],
        stats=NoopEmbeddingStats(),
    )
    model = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    plan = planner.plan(model, [EmbeddingBagCollectionSharder()]).plan[""]
    return {
        table: None if plan[table].compute_kernel == "fused" else plan[table].cache_params.load_factor for table in ROWS
    }
