"""Promise 1 on a GPU: with a cache, training gives bit for bit what stock TorchRec gives with all rows in HBM."""

from __future__ import annotations

import pytest

from tests.ranks.parity import OPTIMIZERS, Case, compare, places_of_parameters
from tests.ranks.workers import RankPool

POLICIES = ("lfu", "frequency")


def _check(outcome, states: bool, evictions: int = 1000) -> None:
    for policy, found in outcome.items():
        assert found.different == [], policy
        assert (found.num_states > 0) == states
        evicted = sum(stats.evictions for stats in found.stats)
        assert evicted >= evictions, f"{policy}: only {evicted} evictions, the case proves nothing"
        assert sum(stats.write_backs for stats in found.stats) >= evicted // 2


@pytest.mark.parametrize("transfer", ["plain", "staged", "triton_uva"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_and_transfer(gpu_rank: RankPool, optimizer: str, transfer: str) -> None:
    case = Case(device="cuda", optimizer=optimizer, transfer=transfer, ratio=0.3)
    (outcome,) = gpu_rank.run(compare, case, POLICIES)
    _check(outcome, states=optimizer != "sgd")


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise"])
@pytest.mark.parametrize("weighted", [False, True])
def test_every_sharding_type(gpu_rank: RankPool, sharding: str, weighted: bool) -> None:
    (outcome,) = gpu_rank.run(compare, Case(device="cuda", sharding=sharding, weighted=weighted, ratio=0.3), POLICIES)
    _check(outcome, states=True)


@pytest.mark.parametrize("transfer", ["staged", "triton_uva"])
def test_half_precision_and_evaluations_in_between(gpu_rank: RankPool, transfer: str) -> None:
    case = Case(device="cuda", transfer=transfer, fp16=(0, 2), ratio=0.35, evaluate_every=4)
    (outcome,) = gpu_rank.run(compare, case, POLICIES)
    _check(outcome, states=True)


def test_tables_that_stay(gpu_rank: RankPool) -> None:
    """FBGEMM's backward tells the rows of a pool apart by number: small tables are no exception."""
    case = Case(device="cuda", rows=(1000, 30, 2000, 9), ratio=0.27)
    (outcome,) = gpu_rank.run(compare, case, POLICIES)
    _check(outcome, states=True, evictions=300)


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise"])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
def test_two_ranks(two_gpu_ranks: RankPool, sharding: str, optimizer: str) -> None:
    case = Case(device="cuda", sharding=sharding, optimizer=optimizer, local_world_size=1, ratio=0.3)
    for outcome in two_gpu_ranks.run(compare, case, POLICIES):
        _check(outcome, states=True, evictions=300)


def test_cached_tables_stay_in_host_memory(gpu_rank: RankPool) -> None:
    """Wrapping the model for data parallelism moves the rest of it to the GPU."""
    (places,) = gpu_rank.run(places_of_parameters, Case(device="cuda"))
    assert {name.split(".")[0]: place for name, place in places.items()} == {"embeddings": "cpu", "dense": "cuda"}


def test_rows_in_mapped_files(gpu_rank: RankPool, tmp_path: object) -> None:
    (outcome,) = gpu_rank.run(compare, Case(device="cuda", host_dir=str(tmp_path), ratio=0.3), POLICIES)
    _check(outcome, states=True)
