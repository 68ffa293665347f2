"""What surrounds the exact step: loading, prefetching, evaluation, misuse, bad ids, budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embershard import IdTable
from tests.covering import covering, keep, matrix
from tests.ranks import behaviour
from tests.ranks.parity import Case
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("sharding", keep(["column_wise"], ["table_wise", "row_wise", "column_wise"]))
def test_loading_replaces_everything_cached(two_ranks: RankPool, sharding: str) -> None:
    for result in two_ranks.run(behaviour.load_full_state, Case(sharding=sharding)):
        assert result == {"loaded": [], "losses": True, "later": []}


def test_loading_one_table_keeps_what_the_others_learned(two_ranks: RankPool) -> None:
    results = two_ranks.run(behaviour.load_one_table, Case(sharding="row_wise", optimizer="sgd"))
    for result in results:
        assert result == {"changed": True, "others": [], "others_compared": 3, "donated": []}


def test_rows_written_behind_the_cache(two_ranks: RankPool) -> None:
    for message in two_ranks.run(behaviour.write_in_place_while_dirty, Case()):
        assert message.startswith("CacheError")
        assert "embershard.flush(model)" in message
    assert two_ranks.run(behaviour.write_in_place_after_flush, Case()) == [True, True]


@pytest.mark.parametrize(("save_cached", "load_cached"), [(True, False), (False, True), matrix(True, True)])
def test_checkpoints_are_stock_checkpoints(
    two_ranks: RankPool, tmp_path: Path, save_cached: bool, load_cached: bool
) -> None:
    case = Case(sharding=("row_wise", "table_wise", "row_wise", "table_wise"), ratio=0.35)
    assert two_ranks.run(behaviour.checkpoint_round_trip, case, str(tmp_path), save_cached, load_cached) == [
        [],
        [],
    ]


@pytest.mark.parametrize(("sharding", "depth"), covering(("table_wise", "row_wise"), (1, 2, 3)))
def test_prefetching_ahead_is_exact(two_ranks: RankPool, sharding: str, depth: int) -> None:
    """Rows are filled between another batch's forward and backward; no step waits for one."""
    case = Case(sharding=sharding, ratio=0.2 + 0.15 * depth)
    assert two_ranks.run(behaviour.prefetch_ahead, case, depth) == [[], []]


#: Arguments of the cached sharder, and the kind of module.
WAYS_IN: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "bags": ({}, False, False),
    "sequences": ({}, True, False),
    "rows": ({"exchange": "rows"}, False, False),
    "data_parallel": ({"mode": "data_parallel"}, False, False),
    "hot rows": ({"hot_rows": {"t": torch.arange(9)}}, False, False),
    "ids": ({"ids": {"t": IdTable()}, "init_seed": 1}, False, False),
    "ids in sequences": ({"ids": {"t": IdTable()}, "init_seed": 1}, True, False),
    "feature processors": ({}, False, True),
}


@pytest.mark.parametrize("way", WAYS_IN)
def test_two_dimensions_are_refused(two_ranks: RankPool, way: str) -> None:
    """Their sync averages slots by number, in which the copies have different rows."""
    for said in two_ranks.run(behaviour.in_two_dimensions, *WAYS_IN[way]):
        assert said.startswith("ShardingError: CachedEmbedding")
        assert "2D parallelism" in said
        assert "the same slot of two caches has different rows" in said


def test_stock_tables_in_two_dimensions_are_not_refused(two_ranks: RankPool) -> None:
    """They come further: to torch, which takes no stand-in for a GPU."""
    for said in two_ranks.run(behaviour.in_two_dimensions, None, False, False):
        assert said.startswith("TypeError: device() received")


def test_a_second_backward_is_refused(one_rank: RankPool) -> None:
    (message,) = one_rank.run(behaviour.backward_twice, Case(ratio=0.5))
    assert message.startswith("CacheError")
    assert "second backward" in message


def test_a_forward_without_backward_gives_its_pins_back(one_rank: RankPool) -> None:
    assert one_rank.run(behaviour.abandoned_forward, Case(ratio=0.5)) == [[1, 0, 0]]


@pytest.mark.parametrize("sequence", [False, True])
def test_converting_the_model_leaves_cached_rows_where_they_are(one_rank: RankPool, sequence: bool) -> None:
    (found,) = one_rank.run(behaviour.convert_the_model, Case(sequence=sequence))
    assert found == {"dense": True, "rows": False, "rows in the host tier": True}


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
@pytest.mark.parametrize("bad", [-1, 2000, 2**40])
def test_an_id_out_of_range_is_named(two_ranks: RankPool, sharding: str, bad: int) -> None:
    for rank, message in enumerate(two_ranks.run(behaviour.bad_id, Case(sharding=sharding), 2, bad)):
        assert message.startswith("IdOutOfRangeError"), message
        for part in (f"rank {rank}", "table 't2'", "feature 'f2'", f"id {bad} ", "position 2", "[0, 2000)"):
            assert part in message, message


def test_evaluation_reads_through_the_cache_and_leaves_it_alone(two_ranks: RankPool) -> None:
    for result in two_ranks.run(behaviour.evaluate_and_count, Case(sharding="row_wise")):
        assert result == {"equal": True, "counted": False, "same_rows": True}


@pytest.mark.parametrize("device_bytes", [60_000, 150_000])
def test_a_byte_budget_is_kept_and_reported(two_ranks: RankPool, device_bytes: int) -> None:
    for result in two_ranks.run(behaviour.device_budget, device_bytes):
        assert result["pools"] >= 2
        assert result["reported"] == result["allocated"] <= device_bytes
        assert result["allocated"] > 0.9 * device_bytes


def test_the_callers_arguments_stay_as_they_are(one_rank: RankPool) -> None:
    assert one_rank.run(behaviour.sharder_leaves_its_arguments_alone) == [True]
