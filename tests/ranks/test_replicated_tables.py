"""Replicated tables are trained by the fused optimizer as stock TorchRec's sharded tables are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.covering import keep
from tests.ranks import replicated_tables
from tests.ranks.rows_exchange import Case
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

TWO = Case(init_seed=3, replicated=(1, 3), ratio=0.3)
CASES = {
    "sgd": Case(init_seed=3, replicated=(1, 3), ratio=0.3, optimizer="sgd"),
    "rowwise_adagrad": TWO,
    "adagrad": Case(init_seed=3, replicated=(1, 3), ratio=0.3, optimizer="adagrad"),
    "mean": Case(init_seed=3, replicated=(1, 3), ratio=0.3, mean=True),
    "weighted": Case(init_seed=3, replicated=(1, 3), ratio=0.3, weighted=True),
    "shared": Case(init_seed=3, replicated=(0, 1), ratio=0.3, shared=True),
    "dims": Case(init_seed=3, replicated=(0, 1, 3), ratio=0.3, dims=(8, 16, 16, 32)),
    "every table": Case(init_seed=3, replicated=(0, 1, 2, 3)),
    "fp16": Case(init_seed=3, replicated=(0, 1), ratio=0.3, fp16=(1,), optimizer="sgd"),
    "a rank without ids": Case(init_seed=3, replicated=(1, 3), ratio=0.3, empty_every=3),
    "evaluation in between": Case(init_seed=3, replicated=(1, 3), ratio=0.3, evaluate_every=3),
    "look-ahead": Case(init_seed=3, replicated=(1, 3), ratio=0.35, lookahead=4, policy="lookahead"),
}


#: What others have, too.
COMBINED = {"sgd", "rowwise_adagrad", "weighted", "dims", "adagrad", "evaluation in between", "mean", "every table"}


@pytest.mark.parametrize("name", keep(CASES.keys() - COMBINED, CASES))
def test_weights_and_states_are_those_of_sharded_tables(two_ranks: RankPool, name: str) -> None:
    for outcome in two_ranks.run(replicated_tables.compare, CASES[name]):
        assert outcome.different == []
        assert outcome.num_compared >= 4


def test_one_rank(one_rank: RankPool) -> None:
    (outcome,) = one_rank.run(replicated_tables.compare, TWO)
    assert outcome.different == []


@pytest.mark.parametrize("optimizer", keep(["adagrad"], ["sgd", "rowwise_adagrad", "adagrad"]))
def test_checkpoints_move_to_shards_and_back(two_ranks: RankPool, tmp_path: Path, optimizer: str) -> None:
    case = Case(init_seed=3, replicated=(1, 3), ratio=0.3, optimizer=optimizer)
    assert two_ranks.run(replicated_tables.move, case, tmp_path) == [[], []]


def test_only_gradients_of_distinct_rows_travel(two_ranks: RankPool) -> None:
    found = two_ranks.run(replicated_tables.bytes_of_a_step, Case(init_seed=3, replicated=(0, 1, 2, 3)))
    most = max(rows for *_, rows in found)  # shorter messages are padded
    for ids, embeddings, gradients, _ in found:
        assert (ids, embeddings) == (0, 0)
        assert gradients == most * (8 + 16 * 4) + 8
