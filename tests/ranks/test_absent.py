"""A rank without a sample (B = 0) takes part in the steps of the others: in all modes and placements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.covering import keep
from tests.ranks import absent
from tests.ranks.rows_exchange import Case
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

#: One of the two ranks has no sample in two of three batches.
CASE = Case(optimizer="adagrad", init_seed=3, absent_every=3, steps=6, batch_size=8, ratio=0.3)
POOLED = replace(CASE, exchange="pooled")
HOT = replace(POOLED, hot=40, hot_every=4)
DATA_PARALLEL = replace(POOLED, mode="data_parallel", sharding="row_wise")
AHEAD = {"lookahead": 4, "policy": "lookahead", "ratio": 0.5}
CASES = {
    "pooled": [
        POOLED,
        replace(POOLED, sharding="column_wise"),
        replace(POOLED, sharding="table_column_wise", **AHEAD),
        replace(POOLED, replicated=(0, 1)),
    ],
    "rows": [
        CASE,
        replace(CASE, sharding="row_wise"),
        replace(CASE, sharding="column_wise"),
        replace(CASE, sharding="table_column_wise"),
        replace(CASE, sharding="column_wise", **AHEAD),
        replace(CASE, sharding="row_wise", mean=True),
        replace(CASE, sharding="column_wise", mean=True),
    ],
    "hot and cold": [
        HOT,
        replace(HOT, sharding="column_wise"),
        replace(HOT, sharding="row_wise", exchange="rows"),
        replace(HOT, mean=True, **AHEAD),
    ],
    "data-parallel": [DATA_PARALLEL, replace(DATA_PARALLEL, **AHEAD), replace(DATA_PARALLEL, mean=True)],
}


@pytest.mark.parametrize("mode", keep(["rows"], CASES))
def test_weights_and_states_are_those_of_stock(two_ranks: RankPool, mode: str) -> None:
    assert two_ranks.run(absent.compare_all, CASES[mode]) == [[[] for _ in CASES[mode]]] * 2


def test_evaluations(two_ranks: RankPool) -> None:
    """Those placements of pooled embeddings among them that gloo cannot train."""
    row_wise = replace(POOLED, sharding="row_wise")
    by_node = replace(POOLED, sharding="table_row_wise", mean=True)
    cases = [row_wise, replace(row_wise, mean=True), by_node, replace(POOLED, sharding="grid_shard")]
    assert two_ranks.run(absent.evaluate, cases) == [[[] for _ in cases]] * 2


def test_gloo_trains_no_row_wise_sums_of_batches_of_several_sizes(two_ranks: RankPool) -> None:
    """Neither in stock TorchRec; on all ranks."""
    case = replace(POOLED, sharding="row_wise")
    stock, ours = (two_ranks.run(absent.error_of_training, case, cached) for cached in (False, True))
    assert stock == ours
    assert all("ProcessGroupGloo::allgather: invalid tensor size" in error for error in ours)
