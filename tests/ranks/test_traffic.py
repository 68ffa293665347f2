"""Bytes between ranks, against a count by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from embershard.cache.statistics import CacheReport
from embershard.distributed.sent_bytes import SentBytes
from embershard.distributed.traffic import count_sent_bytes, counted_as_other, counted_by_hand, sent_bytes
from embershard.planning.verify.compare import Pair
from tests.covering import keep, matrix
from tests.ranks import node_traffic, predicted_traffic
from tests.ranks.parity import Case, batches, build, train
from tests.ranks.predicted_traffic import is_close, plan_of, sent_as_predicted
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks


def of_a_step(case: Case, cached: bool) -> tuple[SentBytes, list[list[int]]]:
    """What this rank sent in one step, and the ids of each of its features."""
    count_sent_bytes()
    count_sent_bytes()  # again: nothing is counted twice
    model: Any = build(case, cached)
    before = sent_bytes()
    train(model, case, steps=1)
    features, _ = next(batches(case, dist.get_rank()))
    return sent_bytes() - before, [features[name].values().tolist() for name in case.features]


def of_collectives() -> dict[str, SentBytes]:
    """What this rank sent in one call of each collective, on 12 floats (48 bytes)."""
    count_sent_bytes()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    full, part = torch.ones(12), torch.ones(12 // ranks)
    parts = list(full.chunk(ranks))
    keep = [torch.empty_like(full) for _ in range(ranks)]
    calls = {
        "all-to-all": lambda: dist.all_to_all_single(torch.empty(12), full),
        "all-to-all of int32": lambda: dist.all_to_all_single(torch.empty(12).int(), full.int()),
        "all-gather": lambda: dist.all_gather(keep, full),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, full),
        "reduce-scatter of a list": lambda: dist.reduce_scatter(part, parts),
        "all-reduce": lambda: dist.all_reduce(full),
        "broadcast": lambda: dist.broadcast(full, src=0),
        "gather": lambda: dist.gather(full, keep if rank == 0 else None, dst=0),
        "scatter": lambda: dist.scatter(part, parts if rank == 0 else None, src=0),
        "barrier": dist.barrier,
    }
    found = {}
    for name, call in calls.items():
        before = sent_bytes()
        call()
        found[name] = sent_bytes() - before
    before = sent_bytes()
    with counted_as_other():
        calls["all-to-all of int32"]()
    found["counted as other"] = sent_bytes() - before
    before = sent_bytes()
    with counted_by_hand("gradients", 7.0):
        dist.all_reduce(full)
    found["counted by hand"] = sent_bytes() - before
    return found


ROWS, DIM, BATCH, TABLES = 600, 16, 16, 4
#: TorchRec's planner puts tables 0 and 2 on rank 0, tables 1 and 3 on rank 1.
CASE = Case(rows=(ROWS,) * TABLES, dims=(DIM,) * TABLES, batch_size=BATCH)
FLOAT, ID, LENGTH = 4, 8, 8
#: Three numbers tell the other rank how much comes: lengths, ids, samples; with weights a fourth.
SIZES = 3 * 8
#: A linear layer's weights and bias, and for each of the two one number that tells whether it was used.
DENSE = (TABLES * DIM + 1) * FLOAT + 2 * 4


@pytest.mark.parametrize("cached", keep([True], [True, False]))
def test_table_wise(two_ranks: RankPool, cached: bool) -> None:
    """Ids of the other's two tables go there, pooled embeddings of one's own two and gradients of the other's."""
    for rank, (sent, ids) in enumerate(two_ranks.run(of_a_step, CASE, cached)):
        away = [values for table, values in enumerate(ids) if table % 2 != rank]
        pooled = 2 * BATCH * DIM * FLOAT
        id_bytes = sum(map(len, away)) * ID + 2 * BATCH * LENGTH + SIZES
        assert sent == SentBytes(id_bytes, pooled, pooled, DENSE, 0)


@pytest.mark.parametrize("weighted", keep([True], [False, True]))
def test_row_wise(two_ranks: RankPool, weighted: bool) -> None:
    """Ids of the other's half of every table go there; sums and gradients of all tables for the other's samples."""
    case = Case(rows=(ROWS,) * TABLES, batch_size=BATCH, sharding="row_wise", weighted=weighted)
    for rank, (sent, ids) in enumerate(two_ranks.run(of_a_step, case, True)):
        away = sum(row // (ROWS // 2) != rank for values in ids for row in values)
        pooled = TABLES * BATCH * DIM * FLOAT
        id_bytes = away * ID + TABLES * BATCH * LENGTH + SIZES + (8 if weighted else 0)
        assert sent == SentBytes(id_bytes, pooled + (away * FLOAT if weighted else 0), pooled, DENSE, 0)


def test_each_collective(two_ranks: RankPool) -> None:
    """On 48 bytes and 2 ranks; the first rank is the root."""
    first, second = two_ranks.run(of_collectives)
    in_common = {
        "all-to-all": SentBytes(embeddings=24),
        "all-to-all of int32": SentBytes(ids=24),
        "all-gather": SentBytes(other=48),
        "reduce-scatter": SentBytes(embeddings=24),
        "reduce-scatter of a list": SentBytes(embeddings=24),
        "all-reduce": SentBytes(other=48),
        "barrier": SentBytes(),
        "counted as other": SentBytes(other=24),
        "counted by hand": SentBytes(gradients=7),
    }
    none = SentBytes()
    assert first == {**in_common, "broadcast": SentBytes(other=48), "gather": none, "scatter": SentBytes(other=24)}
    assert second == {**in_common, "broadcast": none, "gather": SentBytes(other=48), "scatter": none}


def test_one_rank_sends_nothing(one_rank: RankPool) -> None:
    ((sent, _),) = one_rank.run(of_a_step, CASE, True)
    assert sent == SentBytes()


@pytest.mark.parametrize(
    "case",
    [
        matrix(predicted_traffic.Case("row_wise", "rows")),
        matrix(predicted_traffic.Case("column_wise", "pooled")),
        matrix(predicted_traffic.Case("table_wise", "auto", "MLPerf")),
        predicted_traffic.Case("table_wise", "pooled", replicate_rows=predicted_traffic.MOST_COPIED_ROWS),
    ],
    ids=str,
)
def test_counted_bytes_are_the_predicted_ones(two_ranks: RankPool, case: predicted_traffic.Case) -> None:
    """Of each kind within 2 %; `python -m tests.ranks.predicted_traffic` runs all combinations, on 2 and 4 ranks."""
    plan, pairs = predicted_traffic.compared(two_ranks, case, 2)
    assert is_close(pairs), pairs
    assert all(pair.measured for pair in pairs.values())
    exchange = "pooled" if case.exchange == "rows" else "rows"
    other = plan_of(dataclasses.replace(case, exchange=exchange, replicate_rows=0), 2)
    wrong = {kind: Pair(number, pairs[kind].measured) for kind, number in sent_as_predicted(other).items()}
    assert not is_close(wrong), "a plan for another exchange predicts something else"
    if case.exchange == "auto":
        assert {table.exchange for table in plan.tables} == {"pooled", "rows"}


@pytest.mark.parametrize(
    ("exchange", "accumulate"),
    [("rows", 2), ("pooled", 4), *(matrix(*case) for case in [("rows", 1), ("rows", 4), ("pooled", 1), ("pooled", 2)])],
)
def test_steps_of_pieces_send_and_hit_as_predicted(two_ranks: RankPool, exchange, accumulate) -> None:
    """The replay of the whole trace counts what each rank counts; the bytes of all kinds are those of the messages, the
    dense gradients' to the byte."""
    case = predicted_traffic.Case("row_wise", exchange, accumulate=accumulate, rows_per_slot=24)
    plan, pairs, counted = predicted_traffic.with_hits(two_ranks, case, 2)
    assert all(abs(pair.relative_error) < 0.01 for pair in pairs.values()), pairs
    used = 0 if accumulate > 1 else 2  # DDP sends a number for each of a layer's parameters
    assert pairs["dense_all_reduce"].error == -used
    assert plan.prediction.method == "replay"
    for rank, counts in enumerate(counted):
        tables = [table for table in plan.prediction.tables if table.rank == rank]
        told = CacheReport.total(
            CacheReport(
                each.lookups,
                each.unique_ids,
                each.unique_ids * (each.hit_rate_unique or 0.0),
                each.lookups * (each.hit_rate_lookups or 0.0),
                each.fills,
                each.write_backs,
            )
            for each in tables
        )
        assert vars(told) == pytest.approx(vars(counts))
        assert counts.write_backs > 0, "no row left the caches: the case proves nothing"
    if accumulate > 1:
        whole = plan_of(dataclasses.replace(case, accumulate=1), 2)
        told, untold = (sum(table.unique_ids for table in each.prediction.tables) for each in (plan, whole))
        assert told > 1.1 * untold, "the control: a plan for whole batches predicts something else"


SHARDINGS = ("table_wise", "column_wise", "row_wise", "table_row_wise", "grid_shard")


@pytest.mark.parametrize("sharding", keep(["grid_shard"], SHARDINGS))
def test_bytes_within_nodes_and_between_them_are_the_predicted_ones(four_ranks: RankPool, tmp_path, sharding) -> None:
    """On two nodes of two ranks, of ids, embeddings and gradients each, within 2 %; as one node they are others."""
    case = predicted_traffic.Case(sharding, "pooled")
    plan = plan_of(case, 4, ranks_per_node=2)
    plan.save(tmp_path / "plan.json")
    of_ranks = four_ranks.run(node_traffic.train, case, tmp_path / "plan.json")
    predicted = node_traffic.as_predicted(plan)
    counted = {key: sum(of_rank[key] for of_rank in of_ranks) / len(of_ranks) for key in predicted}
    assert counted == pytest.approx(predicted, rel=0.02)
    assert all(predicted[kind, "between"] for kind in ("ids", "embeddings", "gradients"))
    if sharding in ("table_row_wise", "grid_shard"):  # a network card sends an embedding to each other node once
        assert predicted["embeddings", "within"] >= predicted["embeddings", "between"] / 2
    else:
        assert node_traffic.as_predicted(plan_of(case, 4))["embeddings", "between"] == 0, "the control: one node"
