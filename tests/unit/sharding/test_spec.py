"""How many slots a pool gets: never more memory than the budget; one too small says what is needed."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.modules.embedding_configs import DataType

from embershard import CacheConfig, FrequencyProfile
from embershard.cache.config import LEAST_SLOTS, CachePolicy, Policy
from embershard.errors import ConfigError
from embershard.sharding.torchrec.spec import CACHED_KERNEL, CacheSpec
from tests.unit.sharding.pools import OPTIMIZERS, make_pool, make_spec, make_table


def slots_of(rows: list[int], config: CacheConfig, load_factors: tuple[float | None, ...] = (), dim: int = 4) -> int:
    factors = [*load_factors, *[None] * len(rows)]
    tables = [make_table(f"t{i}", n, dim, DataType.FP32, factors[i]) for i, n in enumerate(rows)]
    weights = sum(rows) * dim
    return make_spec(config, weights).num_slots(tables, row_bytes=4 * dim + 4)


@pytest.mark.parametrize(
    ("rows", "ratio", "slots"),
    [
        ([1000], 0.1, 100),
        ([1000, 500], 0.1, 150),
        ([100], 1.0, 100),
        ([100], 1e-6, LEAST_SLOTS),
        ([3], 0.5, 3),
        ([1], 0.05, 1),
    ],
)
def test_a_ratio_is_a_share_of_the_rows_and_a_few_slots_at_least(rows, ratio, slots):
    assert slots_of(rows, CacheConfig(ratio=ratio)) == slots


def test_a_table_s_own_share_in_the_plan_goes_first():
    assert slots_of([100, 100], CacheConfig(ratio=0.1), (0.5, None)) == 60
    assert slots_of([100, 100], CacheConfig(ratio=0.1), (0.5, 1.0)) == 150


def test_a_byte_budget_holds_for_the_tables_without_a_share_of_their_own():
    alone = slots_of([100], CacheConfig(device_bytes=2000))
    assert slots_of([100, 100], CacheConfig(device_bytes=4000), (0.05, None)) >= alone


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    st.integers(100, 200_000),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from(["lookahead", "lfu", "lru"]),
    st.sampled_from([4, 8, 12]),
    st.sampled_from([DataType.FP32, DataType.FP16]),
)
@settings(max_examples=60)
def test_a_pool_never_takes_more_memory_than_the_budget(rows, budget, optimizer, policy: Policy, dim, data_type):
    def pool(device_bytes: int) -> int:
        config = CacheConfig(device_bytes=device_bytes, policy=policy)
        made = make_pool(rows, config, dim=dim, optimizer=optimizer, data_type=data_type)
        assert made.cache.device_bytes <= device_bytes
        assert sum(s.device_bytes for s in made.stats()) == made.cache.device_bytes
        return made.cache.num_slots

    try:
        slots = pool(budget)
    except ConfigError as error:
        needed = int(re.search(r"at least (\d+)", str(error))[1])
        assert needed > budget
        assert pool(needed) == 1
        with pytest.raises(ConfigError):
            pool(needed - 2)  # rounded up
        return
    assert slots == sum(rows) or budget < pool_bytes(rows, slots + 1, policy, dim, optimizer, data_type)


_POLICY_BYTES = {"lookahead": 12, "lfu": 4, "lru": 0}  # per slot


def pool_bytes(rows, slots, policy, dim, optimizer, data_type) -> int:
    row_bytes = make_pool([1], dim=dim, optimizer=optimizer, data_type=data_type).host.row_bytes
    return 4 * sum(rows) + (slots + 1) * (row_bytes + 12 + _POLICY_BYTES[policy])


def test_pools_of_one_rank_share_the_budget():
    config, total = CacheConfig(device_bytes=30_000), 500 * 8 + 300 * 16
    first = make_pool([500], config, dim=8, rank_weights=total)
    second = make_pool([300], config, dim=16, rank_weights=total, optimizer="adagrad")
    assert 0.97 * 30_000 < first.cache.device_bytes + second.cache.device_bytes <= 30_000


def test_a_budget_that_is_too_small_names_tables_and_the_least():
    with pytest.raises(
        ConfigError, match=r"device_bytes=100 does not hold .* of tables \['t0', 't1'\]; give .* at least 309"
    ):
        slots_of([40, 7], CacheConfig(device_bytes=100), dim=8)
    assert slots_of([40, 7], CacheConfig(device_bytes=309), dim=8) == 1


def test_more_budget_than_rows():
    assert slots_of([100, 50], CacheConfig(device_bytes=10**9)) == 150


def test_a_spec_counts_the_shards_of_its_rank_only():
    params = {}
    for name, kernel, shards in (
        ("a", CACHED_KERNEL, [(0, (10, 4)), (1, (10, 4))]),
        ("b", CACHED_KERNEL, [(1, (5, 8))]),
        ("c", "fused", [(1, (1000, 8))]),
        ("d", "dense", None),
    ):
        params[name] = _sharding(kernel, shards)
    config = CacheConfig(ratio=0.1)
    assert [CacheSpec.make(config, None, params, rank).rank_weights for rank in range(3)] == [40, 80, 0]


def test_a_spec_resolves_the_defaults():
    profile = FrequencyProfile({"t0": torch.zeros(4, dtype=torch.int64)}, 1)
    without, with_profile = (CacheSpec.make(CacheConfig(), p, {}, 0) for p in (None, profile))
    assert without.policy == CachePolicy("lfu", by_next_use=True, warmup=False)
    assert with_profile.policy == CachePolicy("frequency", by_next_use=True, warmup=True)
    plain = CacheSpec.make(CacheConfig(policy="lru"), None, {}, 0)
    assert plain.policy == CachePolicy("lru", by_next_use=False)
    assert without != CacheSpec.make(CacheConfig(), None, {}, 0), "TorchRec groups by it: one spec per module"


def _sharding(kernel, shards):
    from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
    from torchrec.distributed.types import ParameterSharding

    spec = shards and EnumerableShardingSpec(
        [
            ShardMetadata(shard_offsets=[1000 * i, 0], shard_sizes=list(sizes), placement=f"rank:{rank}/cpu")
            for i, (rank, sizes) in enumerate(shards)
        ]
    )
    return ParameterSharding("row_wise", kernel, [], spec)


def test_a_spec_does_not_keep_the_profile_alive():
    """TorchRec keeps the spec with the module; the counts are of use while the module is built."""
    profile = FrequencyProfile({"t0": torch.tensor([0, 3, 0, 1])}, 1)
    spec = CacheSpec.make(CacheConfig(), profile, {}, 0)
    counts = spec.row_counts([make_table("t0", 4, 4, DataType.FP32, None)])
    assert counts.dense(4).tolist() == [0, 3, 0, 1]
    assert spec.profile is not None
    del profile
    assert spec.profile() is None
