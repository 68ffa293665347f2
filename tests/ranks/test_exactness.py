"""Promise 1: with a cache, training gives bit for bit what stock TorchRec gives without one.

Every case asserts that rows were really evicted, hundreds of times; the negative controls prove that the
comparison fails when a row's optimizer state stays behind, or when a pinned slot is given away.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import get_args

import pytest

from embershard.cache.config import Scoring
from tests.covering import combinations, keep, matrix
from tests.ranks import faults, initial_weights, parity, rows_exchange
from tests.ranks.modes_matrix import case_of, with_look_ahead
from tests.ranks.parity import ROWS, Outcome, compare, compare_all, losses_of
from tests.ranks.workers import RankError, RankPool
from tests.unit.sharding.plans import SHARDED as POOLED

pytestmark = pytest.mark.ranks

Case = functools.partial(parity.Case, steps=14)  # enough to put out hundreds of rows
POLICIES = get_args(Scoring)
OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad")


def _check(outcomes: list[dict[str, Outcome]], policies: tuple[str, ...], states: bool, evictions: int = 500) -> None:
    """Nothing differs on any rank; states were compared; rows were evicted and written back."""
    for policy in policies:
        by_rank = [outcome[policy] for outcome in outcomes]
        assert [o.different for o in by_rank] == [[] for _ in by_rank], policy
        assert sum(o.num_compared for o in by_rank) >= len(ROWS)
        assert (sum(o.num_states for o in by_rank) > 0) == states
        evicted = sum(stats.evictions for o in by_rank for stats in o.stats)
        written = sum(stats.write_backs for o in by_rank for stats in o.stats)
        assert evicted >= evictions, f"{policy}: only {evicted} evictions, the case proves nothing"
        assert written >= evicted // 2


#: Table-column-wise and table-row-wise are no more than their parts on one node.
KEPT = [
    ("table_wise", "sgd", "frequency"), ("row_wise", "rowwise_adagrad", "lfu"), ("column_wise", "adagrad", "lru"),
    ("grid_shard", "rowwise_adagrad", "lfu"),
]  # fmt: skip


@pytest.mark.parametrize(("sharding", "optimizer", "policy"), combinations(KEPT, POOLED, OPTIMIZERS, POLICIES))
def test_every_sharding_type_optimizer_and_policy(two_ranks, sharding, optimizer, policy) -> None:
    case = Case(sharding=sharding, optimizer=optimizer, policy=policy)
    _check(two_ranks.run(compare, case), (policy,), states=optimizer != "sgd", evictions=1000)


def test_a_policy_of_ones_own_changes_no_bit(two_ranks: RankPool) -> None:
    """It keeps other rows than `lru` does, and trains the same."""
    own = "examples.own_policy:make"
    outcomes = two_ranks.run(compare, Case(sharding="row_wise", optimizer="adagrad"), (own, "lru"))
    _check(outcomes, (own,), states=True, evictions=1000)
    fills = {policy: sum(s.fills for outcome in outcomes for s in outcome[policy].stats) for policy in (own, "lru")}
    assert fills[own] != fills["lru"]


VARIANTS = {
    "mixed_sharding": Case(sharding=("table_wise", "row_wise", "column_wise", "row_wise")),
    "beside_stock_tables": Case(
        sharding=("table_wise", "row_wise", "table_wise", "row_wise"), cached=(0, 3), ratio=0.35
    ),
    "beside_data_parallel_tables": Case(
        sharding=("row_wise", "data_parallel", "table_wise", "row_wise"), cached=(0, 2), ratio=0.3
    ),
    "shared_table": Case(shared=True, ratio=0.27),
    "shared_table_row_wise_adagrad": Case(shared=True, ratio=0.27, sharding="row_wise", optimizer="adagrad"),
    "weighted": Case(weighted=True),
    "weighted_row_wise_sgd": Case(weighted=True, sharding="row_wise", optimizer="sgd"),
    "mean": Case(mean=True),
    "mean_row_wise": Case(mean=True, sharding="row_wise"),
    "mean_grid_adagrad": Case(mean=True, sharding="grid_shard", optimizer="adagrad"),
    "fp16_beside_fp32": Case(fp16=(0, 2), ratio=0.3),
    "fp16_on_the_device": Case(fp16=(0, 1), cached=(1, 2), ratio=0.35, steps=20),
    "fp16_sgd_row_wise": Case(fp16=(0, 1, 2, 3), optimizer="sgd", sharding="row_wise"),
    "different_dims": Case(dims=(16, 8, 16, 32), ratio=0.3),
    "different_dims_column_wise": Case(dims=(16, 8, 16, 32), sharding="column_wise", ratio=0.3),
    "tables_that_stay": Case(rows=(1000, 30, 2000, 9), ratio=0.22, sharding="row_wise"),
    "tables_that_stay_adagrad": Case(rows=(20, 900, 12, 2000), ratio=0.27, optimizer="adagrad"),
    "tables_that_stay_weighted": Case(rows=(20, 900, 12, 2000), ratio=0.27, evaluate_every=4, weighted=True),
    "tables_that_stay_sequence": Case(rows=(30, 1500, 12, 2000), ratio=0.2, sequence=True, sharding="row_wise"),
    "tables_of_one_row": Case(rows=(1, 900, 1, 2000), ratio=0.27, evaluate_every=4),
    "tables_of_one_row_row_wise": Case(rows=(1, 900, 1, 2000), ratio=0.27, optimizer="adagrad", sharding="row_wise"),
    "long_run": Case(steps=80, sharding="row_wise"),
    "evaluation_in_between": Case(evaluate_every=3),
    "evaluation_in_between_row_wise": Case(evaluate_every=3, sharding="row_wise", optimizer="adagrad"),
}
#: What is not a combination of others, and not in another test: shardings beside each other are in `test_one_rank`,
#: tables that stay in `test_small_tables_stay_on_the_device`, evaluations in `test_every_transfer`.
SINGLE = [
    "beside_stock_tables", "shared_table", "weighted", "mean_row_wise", "fp16_beside_fp32",
    "different_dims_column_wise",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "policies"),
    [(name, (POLICIES[number % len(POLICIES)],)) for number, name in enumerate(SINGLE)]
    + [matrix(name, POLICIES) for name in VARIANTS],
)
def test_variants(two_ranks: RankPool, name: str, policies: tuple[str, ...]) -> None:
    case = VARIANTS[name]
    _check(two_ranks.run(compare, case, policies), policies, states=case.optimizer != "sgd")


@pytest.mark.parametrize(
    ("sharding", "optimizer", "policy"),
    combinations(
        [("row_wise", "rowwise_adagrad", "lfu"), ("column_wise", "adagrad", "lru")],
        ("table_wise", "row_wise", "column_wise"),
        OPTIMIZERS,
        POLICIES,
    ),
)
def test_embedding_collection(two_ranks: RankPool, sharding: str, optimizer: str, policy: str) -> None:
    case = Case(sequence=True, sharding=sharding, optimizer=optimizer, policy=policy)
    _check(two_ranks.run(compare, case), (policy,), states=optimizer != "sgd")


MIXED = ("table_wise", "row_wise") * 2


@pytest.mark.parametrize("sharding", keep([MIXED], ["table_wise", "row_wise", "column_wise", MIXED]))
def test_one_rank(one_rank: RankPool, sharding: str | tuple[str, ...]) -> None:
    _check(one_rank.run(compare, Case(sharding=sharding), POLICIES), POLICIES, states=True)


@pytest.mark.parametrize("shardings", [("table_row_wise", "grid_shard"), matrix(("row_wise", "table_wise"))])
def test_four_ranks_on_two_nodes(four_ranks: RankPool, shardings: tuple[str, ...]) -> None:
    """Grid and table-row-wise differ from their parts only with several nodes: two ranks are a node here."""
    four = Case(local_world_size=2, batch_size=8, ratio=0.3)
    cases = [dataclasses.replace(four, sharding=sharding) for sharding in shardings]
    by_rank = four_ranks.run(compare_all, cases, ("frequency",))
    for number in range(len(cases)):
        _check([outcomes[number] for outcomes in by_rank], ("frequency",), states=True)


@pytest.mark.matrix
def test_four_ranks_exchange_distinct_rows(four_ranks: RankPool) -> None:
    """As two ranks do in `test_rows_exchange.py`."""
    samples = [("SUM", "row_wise"), ("MEAN", "table_wise"), ("shared table", "column_wise")]
    cases = [
        dataclasses.replace(case_of(pooling, sharding, "rowwise_adagrad", 4), local_world_size=2)
        for pooling, sharding in samples
    ]
    cases[1] = with_look_ahead(cases[1])
    for outcomes in zip(*four_ranks.run(rows_exchange.compare_all, cases), strict=True):
        assert [outcome.different for outcome in outcomes] == [[]] * 4
        assert all(outcome.num_compared > 0 for outcome in outcomes)
        assert sum(outcome.evictions for outcome in outcomes) > 50


def test_tables_with_fewer_rows_than_ranks(four_ranks: RankPool) -> None:
    """Where we place them, with and without a cache; cut by rows they are refused without one: FBGEMM would fail."""
    tiny = rows_exchange.Case(rows=(3, 2, 5, 1), dims=(16,) * 4, sharding=(), exchange="pooled", ratio=1.0)
    for outcome in four_ranks.run(rows_exchange.compare_dyadic, tiny):
        assert outcome.different == []
    with pytest.raises(RankError, match="rank 3 has no row of its row_wise tables"):
        four_ranks.run(rows_exchange.compare_dyadic, dataclasses.replace(tiny, sharding="row_wise"))


@pytest.mark.matrix
@pytest.mark.parametrize("sharding", ["row_wise", "table_row_wise", "grid_shard"])
def test_four_ranks_on_two_nodes_start_from_a_counters_weights(four_ranks: RankPool, sharding: str) -> None:
    """As one and two ranks do in `test_initial_weights.py`."""
    found = four_ranks.run(initial_weights.wrong_shards, Case(sharding=sharding, local_world_size=2))
    assert [wrong for wrong, _ in found] == [[], [], [], []]


@pytest.mark.matrix
def test_four_ranks_have_the_losses_of_one(one_rank: RankPool, four_ranks: RankPool) -> None:
    """As two ranks have in `test_initial_weights.py`. In float64, too, TorchRec's exchange in two hops adds up a row's
    float32 gradients in another order."""
    ((losses, _),) = one_rank.run(initial_weights.run_of_global_batches)
    for others, _ in four_ranks.run(initial_weights.run_of_global_batches):
        assert others == pytest.approx(losses, abs=initial_weights.CLOSE, rel=0)


def test_rows_in_mapped_files(two_ranks: RankPool, tmp_path: object) -> None:
    case = Case(host_dir=str(tmp_path), sharding="row_wise")
    _check(two_ranks.run(compare, case), ("lfu",), states=True)


@pytest.mark.parametrize(
    ("transfer", "optimizer"),
    combinations([("triton_uva", "adagrad")], ("staged", "triton_uva"), OPTIMIZERS),
)
def test_every_transfer(two_ranks: RankPool, transfer: str, optimizer: str) -> None:
    """The ways of a GPU, with a CPU in its place: the kernel in Triton's interpreter, the buffers not page-locked."""
    case = Case(transfer=transfer, optimizer=optimizer, sharding="row_wise", fp16=(1,), ratio=0.27, evaluate_every=7)
    _check(two_ranks.run(compare, case), ("lfu",), states=optimizer != "sgd")


@pytest.mark.parametrize(
    ("sharding", "comm"),
    combinations([("row_wise", ("fp16", "fp32"))], ("table_wise", "row_wise"), (("fp16", "fp32"), ("fp32", "fp16")))
    + [matrix(sharding, ("fp16", "fp16")) for sharding in ("table_wise", "row_wise")],
)
def test_embeddings_that_travel_in_half_precision(two_ranks: RankPool, sharding: str, comm: tuple[str, str]) -> None:
    """Stock and cached round in the same way; and it is not what fp32 gives."""
    case = Case(sharding=sharding, comm=comm)
    _check(two_ranks.run(compare, case), ("lfu",), states=True)
    assert two_ranks.run(losses_of, case) != two_ranks.run(losses_of, Case(sharding=sharding))


def test_growing_cache_stays_exact(two_ranks: RankPool) -> None:
    case = Case(ratio=0.02, overflow="grow", steps=40)
    outcomes = two_ranks.run(faults.compare_ignoring_growth_warnings, case)
    _check(outcomes, ("lfu",), states=True, evictions=500)
    assert sum(stats.overflow_growths for outcome in outcomes for stats in outcome["lfu"].stats) >= 2


@pytest.mark.parametrize("sharding", ["row_wise", matrix("table_wise")])
def test_a_static_cache(two_ranks: RankPool, sharding: str) -> None:
    """Rows outside of the cache are trained right; and not if what trained them is not written back."""
    case = Case(sharding=sharding, optimizer="adagrad", policy="static")
    _check(two_ranks.run(compare, case), ("static",), states=True, evictions=1000)
    outcomes = two_ranks.run(faults.compare_with_fault, case, "write_back_skipped")
    assert any(outcome["static"].different for outcome in outcomes)


@pytest.mark.matrix
@pytest.mark.parametrize("fault", keep(["pins_ignored"], faults.FAULTS))
def test_the_comparison_fails_when(two_ranks: RankPool, fault: str) -> None:
    """Negative controls: each fault is one line that the cache must not get wrong."""
    case = dataclasses.replace(Case(), sharding="row_wise")
    outcomes = two_ranks.run(faults.compare_with_fault, case, fault)
    assert any(outcome["lfu"].different for outcome in outcomes), f"{fault} went unnoticed"
    assert sum(s.evictions for o in outcomes for s in o["lfu"].stats) >= 500


def test_small_tables_stay_on_the_device(two_ranks: RankPool) -> None:
    """The smallest tables never miss after they came in, whatever the others do."""
    case = dataclasses.replace(VARIANTS["tables_that_stay"], steps=20)
    for outcome in two_ranks.run(compare, case, POLICIES[1:]):
        for policy in POLICIES[1:]:
            by_table = {stats.table: stats for stats in outcome[policy].stats}
            for small in (by_table["t1"], by_table["t3"]):
                assert small.evictions == small.critical_path_fills == 0
                assert small.hits_unique == small.unique_ids > 0
                assert small.slots >= small.fills == small.rows
            assert by_table["t2"].evictions > 300
