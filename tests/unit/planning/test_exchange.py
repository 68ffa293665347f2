"""What each table exchanges between ranks, by the bytes."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.data.sources.synthetic import MLPERF_BAG_SIZES
from embershard.planning.cost.rates import StepWork
from embershard.planning.cost.work import sizes_bytes
from embershard.planning.exchange import exchange_notes
from embershard.planning.make_plan import make_plan
from embershard.planning.simulate.pool_report import RowRange
from embershard.planning.simulate.replay import StepCut, replay_pool
from embershard.planning.workload import Workload
from embershard.settings.decoding import decode
from embershard.sharding.sharding_types import ROWS_TYPES
from embershard.sharding.shards import TablePlacement
from embershard.sharding.sizes import PlacedShard
from embershard.units import parse_bytes
from tests.unit.planning.requests import LFU, data_of, make_request, make_workload
from tests.unit.sharding.plans import ranks_for

ROWS = (5000, 900, 300, 40)


def workload(exchange: Any, bag_size: int = 1, **changes: Any) -> Workload:
    return make_workload(ROWS, data=data_of(ROWS, 6000 // bag_size, bag_size=bag_size), exchange=exchange, **changes)


#: Of the tables, in turn: MLPerf's smallest, its usual, and its largest bags.
BAG_SIZES = st.sampled_from([1, 3, 12, max(MLPERF_BAG_SIZES)])


@pytest.mark.slow
@given(BAG_SIZES, st.sampled_from([2, 4, 16]), st.sampled_from(ROWS_TYPES), st.integers(1, 512))
def test_auto_never_sends_more_than_the_better_of_both(bag_size, world_size, sharding, batch_size):
    of = workload("auto", bag_size, world_size=world_size, batch_size=batch_size)
    for table in of.model.tables:
        pooled, rows = (of.exchange_bytes(table.table, sharding, table.dim, kind) for kind in ("pooled", "rows"))
        chosen = of.exchange_of(table.table, sharding, table.dim)
        assert of.exchange_bytes(table.table, sharding, table.dim, chosen) == min(pooled, rows)


@pytest.mark.slow
@settings(max_examples=20)
@given(
    BAG_SIZES, st.sampled_from([2, 4]), st.lists(st.sampled_from([*ROWS_TYPES, "grid_shard"]), min_size=4, max_size=4)
)
def test_auto_never_sends_more_for_all_tables_together(bag_size, world_size, kinds):
    """At the same places; tables of a type that cannot exchange rows among them."""
    of = workload("auto", bag_size, world_size=world_size)
    sizes = zip(of.model.tables, kinds, strict=True)
    tables = [
        TablePlacement(
            size.table, size.rows, size.dim, "fp32", kind, "cached", ranks_for(kind, 0, world_size, world_size, 2)
        )
        for size, kind in sizes
    ]
    note, reasons = exchange_notes(of, [of.with_exchange(table) for table in tables])
    sent, pooled, rows = map(parse_bytes, re.findall(r"[0-9.]+ [KM]?i?B\b", note))
    assert sent <= min(pooled, rows)
    assert all(table.table in reasons for table in tables)


def test_bytes_by_hand():
    """A rank's distinct ids of 8 bytes and their rows of 64 floats; half of them are another rank's."""
    of = workload("rows")
    distinct = of.distinct_per_rank("t0")
    assert 10 < distinct < 64
    for sharding, num_shards in (("table_wise", 1), ("row_wise", 2)):
        expected = distinct * (8 + 2 * 64 * 4) + 4 * num_shards
        assert of.exchange_bytes("t0", sharding, 64, "rows") == pytest.approx(expected)


def test_short_bags_exchange_rows_and_long_ones_pooled_embeddings():
    assert {workload("auto").exchange_of(name, "table_wise", 64) for name in ("t0", "t1", "t2", "t3")} == {"rows"}
    long = workload("auto", bag_size=40, batch_size=16)
    assert long.exchange_of("t0", "table_wise", 64) == "pooled"
    assert long.exchange_of("t3", "table_wise", 64) == "pooled"  # 40 rows, of which a batch of 16 x 40 ids has most
    assert workload("auto", bag_size=40, batch_size=512).exchange_of("t3", "table_wise", 64) == "rows"


@pytest.mark.parametrize("exchange", ["rows", "auto"])
def test_what_cannot_exchange_rows_exchanges_pooled_embeddings(exchange):
    assert workload(exchange).exchange_of("t0", "table_row_wise", 64) == "pooled"
    assert workload(exchange, world_size=1).exchange_of("t0", "table_wise", 64) == "pooled"
    assert workload("pooled").exchange_of("t0", "table_wise", 64) == "pooled"


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["pooled", "rows", "auto"])
def test_a_plan_says_it_per_table_and_predicts_the_bytes(exchange):
    request = make_request(workload=workload(exchange), types=("table_wise", "row_wise"))
    plan = make_plan(request)
    notes = [note for note in plan.notes if "exchange distinct rows" in note]
    assert {table.exchange for table in plan.tables} == {"pooled" if exchange == "pooled" else "rows"}
    assert len(notes) == (exchange != "pooled")
    predicted = sum(decode(StepWork, rank.work).all_to_all_bytes for rank in plan.prediction.ranks)
    of_tables = sum(
        request.workload.exchange_bytes(table.table, table.sharding, table.dim, table.exchange) for table in plan.tables
    )
    groups = {(table.sharding, table.exchange) for table in plan.tables}
    assert predicted == pytest.approx(of_tables + 2 * sizes_bytes(len(groups), world_size=2))


def test_types_without_rows_are_not_planned_for_rows():
    """On several nodes table-row-wise would be tried, too."""
    for exchange, is_tried in (("rows", False), ("auto", True)):
        request = make_request(workload=workload(exchange, world_size=4, ranks_per_node=2))
        assert any("table_row_wise" in types for types in request.allowed.values()) == is_tried


def test_the_note_compares_all_three():
    of = workload("auto")
    tables = [TablePlacement("t0", 5000, 64, "fp32", "table_wise", "cached", (0,), "rows")]
    note, reasons = exchange_notes(of, tables)
    assert note.startswith("1 of 1 tables exchange distinct rows: a rank sends ")
    assert re.search(r"the largest gains: t0 distinct rows, [0-9.]+ KiB \(pooled: [0-9.]+ KiB\)\.$", reasons)
    assert len(exchange_notes(workload("rows"), tables)) == 1
    assert exchange_notes(workload("pooled"), tables) == []


def test_a_replay_of_exchanged_rows_counts_a_row_once_per_rank():
    """Against a count by hand over the trace; fills and distinct rows are those of pooled embeddings."""
    of = workload("rows")
    trace = of.data.trace
    assert trace is not None
    shards = [RowRange("t0", 0, 5000), RowRange("t2", 0, 300)]
    pooled, rows = (
        replay_pool(trace, shards, 600, 128, LFU, num_steps=40, cut=StepCut(2, is_distinct=is_distinct)).shards
        for is_distinct in (False, True)
    )
    for shard, before, after in zip(shards, pooled, rows, strict=True):
        table = trace.tables[shard.table]
        first = table.samples < 40 * 128
        pairs = {*zip((table.samples[first] // 64).tolist(), table.rows[first].tolist(), strict=True)}
        assert after.lookups == pytest.approx(len(pairs) / 40)
        assert after.lookups < before.lookups
        assert after.unique_ids == before.unique_ids


def test_lookups_from_counts_are_those_that_arrive():
    of = workload("rows")
    table = of.model.tables[0]
    shard = PlacedShard(table, 0, 0, 5000, 64, "table_wise", "cached", "rows")
    (report,) = of.counted_reports([shard], 600)
    (pooled,) = of.counted_reports([dataclasses.replace(shard, exchange="pooled")], 600)
    assert report.lookups == pytest.approx(2 * of.distinct_per_rank("t0"))
    assert report.lookups < pooled.lookups
    assert report.unique_ids - report.hits_unique == pytest.approx(report.lookups - report.hits_lookups)
    assert 0 < report.hit_rate_lookups < pooled.hit_rate_lookups
