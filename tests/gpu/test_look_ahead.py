"""Promise 1 on a GPU through the look-ahead pipeline: its streams plan, copy and train side by side. Delays on the
streams make it likely that what no event orders goes wrong."""

from __future__ import annotations

from typing import get_args

import pytest

from embershard.cache.config import Scoring
from tests.ranks import look_ahead_events
from tests.ranks.look_ahead import Case, Outcome, Run, compare
from tests.ranks.parity import OPTIMIZERS
from tests.ranks.workers import RankPool

TRANSFERS = ("plain", "staged", "triton_uva")


def _check(outcomes: list[Outcome], evictions: int = 200) -> None:
    for outcome in outcomes:
        assert outcome.different == []
        assert outcome.num_compared >= 4
        assert outcome.evictions >= evictions, f"only {outcome.evictions} evictions, the case proves nothing"
        assert outcome.write_backs >= outcome.evictions // 2


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_and_transfer(gpu_rank: RankPool, optimizer: str, transfer: str) -> None:
    runs = [
        Run(64, 2, 3, transfer=transfer, delays=1),
        Run(4, 3, 3, 0, True, transfer=transfer, slot_map="hashed", delays=2),
    ]
    (outcomes,) = gpu_rank.run(compare, Case(device="cuda", optimizer=optimizer), runs)
    _check(outcomes)


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise"])
@pytest.mark.parametrize("sequence", [False, True])
def test_every_sharding_type(gpu_rank: RankPool, sharding: str, sequence: bool) -> None:
    case = Case(device="cuda", sharding=sharding, sequence=sequence)
    (outcomes,) = gpu_rank.run(compare, case, [Run(4, 2, 3, delays=3), Run(1, 1, 1), Run(64, 3, 4, worker=True)])
    _check(outcomes)


@pytest.mark.parametrize("policy", get_args(Scoring))
def test_every_policy(gpu_rank: RankPool, policy: str) -> None:
    run = Run(4, 2, 3, policy=policy, profile=policy == "frequency", delays=4)
    (outcomes,) = gpu_rank.run(compare, Case(device="cuda"), [run])
    _check(outcomes)


def test_tables_that_stay(gpu_rank: RankPool) -> None:
    """FBGEMM's backward tells the rows of a pool apart by number: small tables are no exception."""
    case = Case(device="cuda", rows=(1000, 20, 2000, 9), ratio=0.15, steps=20)
    (outcomes,) = gpu_rank.run(compare, case, [Run(4, 1), Run(64, 2, delays=5)])
    _check(outcomes)


def test_a_pool_that_grows(gpu_rank: RankPool) -> None:
    case = Case(device="cuda", sharding="row_wise", ratio=0.02)
    (outcomes,) = gpu_rank.run(compare, case, [Run(4, 2, overflow="grow", delays=6)])
    _check(outcomes)
    assert outcomes[0].growths >= 1


@pytest.mark.parametrize("event", look_ahead_events.BETWEEN_STEPS)
def test_between_steps(gpu_rank: RankPool, event: str) -> None:
    case = Case(device="cuda", sharding="row_wise", ratio=0.4)
    runs = [Run(4, 2, delays=7), Run(64, 2, delays=8)]
    assert gpu_rank.run(look_ahead_events.between_steps, case, runs, event) == [[[], []]]


@pytest.mark.parametrize("at", ["at the end", "in the middle"])
def test_evaluating_through_the_pipeline(gpu_rank: RankPool, at: str) -> None:
    case = Case(device="cuda", sharding="row_wise", ratio=0.4, steps=16)
    (found,) = gpu_rank.run(look_ahead_events.evaluate_through_the_pipeline, case, Run(4, 2), at)
    assert found["different"] == []
    assert found["untouched"]


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_two_ranks(two_gpu_ranks: RankPool, sharding: str) -> None:
    case = Case(device="cuda", sharding=sharding, local_world_size=1)
    by_rank = two_gpu_ranks.run(compare, case, [Run(4, 2, 3, delays=9), Run(64, 2, 3, transfer="staged")])
    for outcomes in by_rank:
        _check(outcomes, evictions=100)
