"""What goes by a route has stock TorchRec's bits; what has none goes TorchRec's way, and has them too."""

from __future__ import annotations

import dataclasses

import pytest

from tests.ranks import routes
from tests.ranks.look_ahead import Case, Run
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

RUN = Run(lookahead=4, prefetch=2)
MIXED = Case(
    sharding=("table_wise", "column_wise", "table_wise", "column_wise"), dims=(16, 32, 8, 16), shared=True, ratio=0.3
)
ROUTED = {
    "table-wise": Case(),
    "column-wise": Case(sharding="column_wise", optimizer="adagrad"),
    "both, of three dims, a feature twice": MIXED,
    "means and halves": Case(batch_size=8, mean=True, fp16=(1, 2), optimizer="sgd"),
    "a table on the device": Case(cached=(0, 2, 3)),
    "int32 ids, batches without ids": Case(int32_ids=True, empty_every=3),
    "all tables on one rank": Case(rows=(1000,), dims=(16,)),
    "modules that each read some features": Case(batch_size=8, modules=(("pooled", 2), ("pooled", 2))),
}
UNEVEN = Case(batch_size=8, uneven_every=3)
OTHERS = {
    "row-wise": Case(sharding="row_wise"),
    "weights of ids": Case(weighted=True),
    "quantised rows on the wire": Case(comm=("fp16", "fp32")),
    "sequences": Case(sequence=True),
}


@pytest.mark.parametrize("name", ROUTED)
def test_rows_by_a_route_have_stocks_bits(two_ranks: RankPool, name: str) -> None:
    found = two_ranks.run(routes.compare, ROUTED[name], RUN)
    assert [outcome.different for outcome, _ in found] == [[], []]
    assert sum(outcome.evictions for outcome, _ in found) > 200
    for _, ways in found:
        num_modules = len(ROUTED[name].parts)
        assert ways["TorchRecExchange"] == num_modules, "the first batch, which TorchRec checks"
        assert ways["RoutedExchange"] == num_modules * (ROUTED[name].steps - 1)


@pytest.mark.parametrize("name", ["table-wise", "both, of three dims, a feature twice"])
def test_so_have_they_on_one_rank_and_on_four(one_rank: RankPool, four_ranks: RankPool, name: str) -> None:
    for pool in (one_rank, four_ranks):
        found = pool.run(routes.compare, dataclasses.replace(ROUTED[name], batch_size=8), RUN)
        assert [outcome.different for outcome, _ in found] == [[] for _ in found]
        assert all(ways["RoutedExchange"] == ROUTED[name].steps - 1 for _, ways in found)


@pytest.mark.parametrize("name", OTHERS)
def test_what_has_no_route_goes_torchrecs_way(two_ranks: RankPool, name: str) -> None:
    case = OTHERS[name]
    found = two_ranks.run(routes.compare, case, RUN)
    assert [outcome.different for outcome, _ in found] == [[], []]
    assert all(ways == {"TorchRecExchange": case.steps} for _, ways in found)


def test_batches_of_which_ranks_have_other_numbers_of_samples_go_torchrecs_way(two_ranks: RankPool) -> None:
    found = two_ranks.run(routes.compare, UNEVEN, RUN)
    assert [outcome.different for outcome, _ in found] == [[], []]
    uneven = sum(step % UNEVEN.uneven_every == 1 for step in range(UNEVEN.steps))
    for _, ways in found:
        assert ways == {"TorchRecExchange": 1 + uneven, "RoutedExchange": UNEVEN.steps - 1 - uneven}


@pytest.mark.parametrize("fault", ["samples exchanged", "columns exchanged", "gradients not divided"])
def test_a_route_with_a_fault_is_noticed(two_ranks: RankPool, fault: str) -> None:
    found = two_ranks.run(routes.compare, ROUTED["table-wise"], RUN, fault)
    assert any(outcome.different for outcome, _ in found)


def test_a_cache_that_grows_looks_up_its_new_slots(two_ranks: RankPool) -> None:
    run = dataclasses.replace(RUN, overflow="grow")
    case = dataclasses.replace(ROUTED["table-wise"], ratio=0.02, steps=16)
    found = two_ranks.run(routes.compare, case, run)
    assert [outcome.different for outcome, _ in found] == [[], []]
    assert all(outcome.growths for outcome, _ in found)
