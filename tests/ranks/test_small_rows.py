"""Small rows in the host tier: the same bits as stock TorchRec's tables that are rounded after each step, on 1 and 2
ranks; and the faults that this comparison sees."""

from __future__ import annotations

import pytest

from tests.covering import keep
from tests.ranks.small_rows import Found, compare, rows_of_all_ranks, small_case
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.slow


def check(found: list[Found]) -> None:
    assert [each.different for each in found] == [[]] * len(found)
    assert min(each.evictions for each in found) > 10_000
    assert min(each.num_compared for each in found) >= 3
    assert min(each.num_rounded for each in found) > 10_000


OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad"]


@pytest.mark.parametrize("optimizer", keep(["adagrad"], OPTIMIZERS))
@pytest.mark.parametrize("host_dtype", keep(["int8"], ["int8", "fp16"]))
def test_one_rank_equals_rounded_stock(one_rank: RankPool, optimizer: str, host_dtype: str) -> None:
    full = 0.05 if host_dtype == "int8" else None
    check(one_rank.run(compare, small_case(optimizer=optimizer, host_dtype=host_dtype, full_rows=full)))


@pytest.mark.parametrize("sharding", keep(["column_wise"], ["row_wise", "column_wise"]))
@pytest.mark.parametrize("optimizer", keep(["rowwise_adagrad"], OPTIMIZERS))
def test_two_ranks_equal_rounded_stock(two_ranks: RankPool, sharding: str, optimizer: str) -> None:
    check(two_ranks.run(compare, small_case(optimizer=optimizer, sharding=sharding)))


@pytest.mark.matrix
@pytest.mark.parametrize("sharding", ["row_wise", "column_wise"])
def test_two_ranks_equal_rounded_stock_in_half_precision(two_ranks: RankPool, sharding: str) -> None:
    check(two_ranks.run(compare, small_case(sharding=sharding, host_dtype="fp16", full_rows=None)))


def test_every_row_may_be_rounded(one_rank: RankPool) -> None:
    check(one_rank.run(compare, small_case(full_rows=0.0, profile=False)))


FAULTS = ["reference_not_rounded", "slot_not_rounded", "full_shifted", "at_write_backs"]


@pytest.mark.matrix
@pytest.mark.parametrize("fault", keep(["slot_not_rounded"], FAULTS))
def test_what_is_done_wrongly_is_seen(one_rank: RankPool, fault: str) -> None:
    (found,) = one_rank.run(compare, small_case(steps=60), fault)
    assert found.different


@pytest.mark.parametrize("host_dtype", keep(["int8"], ["int8", "fp16"]))
def test_rows_do_not_depend_on_the_ranks(one_rank: RankPool, two_ranks: RankPool, host_dtype: str) -> None:
    """Gradients are dyadic, so that their sums are exact in any order."""
    full = 0.05 if host_dtype == "int8" else None
    case = small_case(
        sharding="row_wise", optimizer="sgd", host_dtype=host_dtype, full_rows=full, profile=False, steps=20
    )
    if host_dtype == "int8":  # a profile would be of other batches on one rank
        case = small_case(sharding="row_wise", optimizer="sgd", full_rows=0.0, profile=False, steps=20)
    (alone,) = one_rank.run(rows_of_all_ranks, case)
    for together in two_ranks.run(rows_of_all_ranks, case):
        assert together == alone
