"""Embeddings that travel as bytes: bit for bit what one process makes of them that encodes and decodes by itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from embershard.distributed.sent_bytes import SentBytes
from tests.covering import matrix
from tests.ranks import look_ahead, node_traffic, predicted_traffic, routes, rows_exchange, wire_types
from tests.ranks.look_ahead import Run
from tests.ranks.parity import Case, compare
from tests.ranks.predicted_traffic import plan_of
from tests.ranks.wire_types import Reference, WireCase
from tests.ranks.workers import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.extra]

MIXED = ("table_wise", "row_wise", "column_wise", "table_row_wise")
CASE = WireCase(rows=(2000, 900, 3000, 700), comm=("int8", "fp8"), steps=14, init_seed=3, ratio=0.3)


def check(pool: RankPool, case: WireCase) -> list[Any]:
    """Train on the ranks, and compare with one process; what the ranks saw."""
    trained = pool.run(wire_types.train, case)
    assert Reference(case, trained).differences(trained) == []
    assert sum(each.evictions for each in trained) > 500
    return trained


@pytest.mark.parametrize(
    ("sharding", "comm", "optimizer"),
    [
        pytest.param(MIXED, ("int8", "fp8"), "rowwise_adagrad", marks=pytest.mark.smoke),
        ("table_wise", ("int8", "int8"), "adagrad"),
        ("column_wise", ("fp8", "fp16"), "rowwise_adagrad"),
        ("row_wise", ("fp8", "fp8"), "rowwise_adagrad"),
        ("row_wise", ("fp32", "int8"), "sgd"),
    ],
)
def test_bits_are_those_of_one_process_on_two_ranks(two_ranks: RankPool, sharding, comm, optimizer) -> None:
    check(two_ranks, dataclasses.replace(CASE, sharding=sharding, comm=comm, optimizer=optimizer, shared=True))


@pytest.mark.parametrize(
    ("sharding", "comm"),
    [(MIXED, ("int8", "int8")), ("row_wise", ("int8", "fp8")), ("grid_shard", ("fp8", "int8"))],
)
def test_bits_are_those_of_one_process_on_two_nodes(four_ranks: RankPool, sharding, comm) -> None:
    case = dataclasses.replace(CASE, sharding=sharding, comm=comm, local_world_size=2, batch_size=8, steps=20)
    trained = check(four_ranks, case)
    for fault in ("scale of another row", "added in another order", "not divided"):
        if sharding == "row_wise" or fault != "added in another order":
            assert Reference(case, trained, fault).differences(trained), fault


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise"])
@pytest.mark.parametrize("uneven", [5, -16])
def test_ranks_with_other_numbers_of_samples(two_ranks: RankPool, sharding: str, uneven: int) -> None:
    """Gloo gathers no gradients of row-wise tables then; bytes go by an all-to-all. The second rank may have none."""
    check(two_ranks, dataclasses.replace(CASE, sharding=sharding, uneven=uneven, steps=25 if uneven > 0 else 90))


@pytest.mark.parametrize("exchange", ["pooled", "rows"])
def test_features_of_other_widths_have_a_scale_each(two_ranks: RankPool, exchange: str) -> None:
    case = dataclasses.replace(CASE, dims=(16, 8, 32, 4), shared=True)
    if exchange == "pooled":
        check(two_ranks, case)
    else:
        trained = two_ranks.run(wire_types.train, dataclasses.replace(case, exchange="rows", sharding="column_wise"))
        assert sum(each.evictions for each in trained) > 300


@pytest.mark.parametrize(
    "case",
    [
        Case(sharding="grid_shard", comm=("int8", "fp8"), steps=14),
        Case(sequence=True, comm=("int8", "fp8"), steps=14, ratio=0.3),
        Case(sequence=True, sharding="row_wise", comm=("fp8", "int8"), steps=14, ratio=0.3),
        Case(sharding="row_wise", comm=("int8", "int8"), steps=14, mean=True, ratio=0.3),
        Case(sharding="column_wise", comm=("int8", "int8"), steps=14, weighted=True, ratio=0.3, evaluate_every=4),
    ],
    ids=["grid", "sequences", "sequences by rows", "means", "weighted, evaluated"],
)
def test_with_a_cache_as_without(two_ranks: RankPool, case: Case) -> None:
    """Both sharders send bytes; and it is not what fp32 gives."""
    outcomes = [outcome["lfu"] for outcome in two_ranks.run(compare, case)]
    assert [outcome.different for outcome in outcomes] == [[], []]
    assert sum(stats.evictions for outcome in outcomes for stats in outcome.stats) > 300
    whole = dataclasses.replace(case, comm=("fp32", "fp32"))
    assert two_ranks.run(wire_types.losses_of, case) != two_ranks.run(wire_types.losses_of, whole)


def test_rows_known_ahead_have_the_same_bits_and_no_route(two_ranks: RankPool) -> None:
    case = look_ahead.Case(comm=("int8", "fp8"))
    found = two_ranks.run(routes.compare, case, Run(8, 2))
    assert [outcome.different for outcome, _ in found] == [[], []]
    assert all(ways == {"TorchRecExchange": case.steps} for _, ways in found)


#: What TorchRec and FBGEMM make of their own types on gloo: "replaced" by fp16, "fails" in the first batch.
SIDES = ("embeddings", "gradients")
ON_SUMS = {"int8": "fails", "fp8": "replaced", "mx4": "replaced"}
ONE_BY_ONE = {"int8": "", "fp8": "fails", "mx4": ""}


@pytest.mark.parametrize(
    ("case", "cached", "outcomes"),
    [
        (Case(sharding="row_wise"), True, ON_SUMS),
        (Case(sharding="table_wise"), True, ONE_BY_ONE),
        matrix(Case(sharding="table_row_wise"), False, ON_SUMS),
        matrix(Case(sharding="column_wise"), False, ONE_BY_ONE),
        matrix(Case(sharding="row_wise", sequence=True), True, ONE_BY_ONE),
        (Case(sharding="row_wise", exchange="rows"), True, ONE_BY_ONE),
    ],
    ids=["sums", "rows of whole tables", "sums, stock", "columns, stock", "sequences", "distinct rows"],
)
def test_what_torchrec_replaces_is_refused(two_ranks: RankPool, case: Case, cached: bool, outcomes) -> None:
    """And what fails in the first batch; what TorchRec does is seen with the check left out. Other types pass it."""
    case = dataclasses.replace(case, dims=(32,) * 4, steps=3, init_seed=3, ratio=0.5)
    asked = {(kind, side): (kind, "fp32")[:: 1 - 2 * side] for kind in ("fp16", *outcomes) for side in (0, 1)}
    types = [("fp32", "fp32"), ("fp16", "fp16"), *asked.values()]
    unchecked = two_ranks.run(wire_types.with_torchrec_s, case, types, cached, False)
    checked = two_ranks.run(wire_types.with_torchrec_s, case, types, cached, True)
    for found, free in zip(checked, unchecked, strict=True):
        for (kind, side), pair in asked.items():
            assert free[pair] != free["fp32", "fp32"], "it sends something else"
            expected = outcomes.get(kind, "")
            if not expected:
                assert found[pair] == free[pair]
                assert isinstance(found[pair], list)
                continue
            half = free[("fp16", "fp32")[:: 1 - 2 * side]]
            assert isinstance(free[pair], str) if expected == "fails" else free[pair] == half
            assert str(found[pair]).startswith("ConfigError: got a qcomm_codecs_registry of TorchRec's that does not")
            assert f"['t0', 't1', 't2', 't3'] it has {kind} for {SIDES[side]}" in str(found[pair])
            assert 'WireTypes("int8", "fp8")' in str(found[pair])
            assert ("replaces by fp16" in str(found[pair])) == (expected == "replaced")


BATCH, DIM, TABLES = 16, 16, 4


@pytest.mark.parametrize(
    ("comm", "widths"), [(("int8", "fp8"), (DIM + 4, DIM + 4)), (("fp16", "int8"), (2 * DIM, DIM + 4))]
)
def test_bytes_of_pooled_embeddings(two_ranks: RankPool, comm, widths) -> None:
    """Table-wise: those of one's two tables, and gradients of the other's; row-wise: of all four."""
    for sharding, features in (("table_wise", TABLES // 2), ("row_wise", TABLES)):
        case = WireCase(rows=(600,) * TABLES, sharding=sharding, comm=comm, steps=1)
        for trained in two_ranks.run(wire_types.train, case):
            rows = features * BATCH
            assert trained.sent.embeddings == rows * widths[0]
            assert trained.sent.gradients == rows * widths[1]


def test_bytes_of_distinct_rows(two_ranks: RankPool) -> None:
    """A row and its gradient take a byte a number and four for the scale; ids are as many as ever."""
    eight = two_ranks.run(rows_exchange.sent_in_a_step, rows_exchange.Case(comm=("int8", "fp8")))
    for (sent, _), (whole, _) in zip(
        eight, two_ranks.run(rows_exchange.sent_in_a_step, rows_exchange.Case()), strict=True
    ):
        assert sent.embeddings == whole.embeddings / (4 * DIM) * (DIM + 4)
        assert sent.gradients == whole.gradients / (4 * DIM) * (DIM + 4)
        assert sent.ids == whole.ids


@pytest.mark.parametrize(
    "case",
    [
        predicted_traffic.Case("row_wise", "pooled", comm=("int8", "fp8")),
        matrix(predicted_traffic.Case("column_wise", "pooled", comm=("fp8", "fp8"))),
        predicted_traffic.Case("table_wise", "rows", comm=("fp16", "int8")),
    ],
    ids=str,
)
def test_counted_bytes_are_the_predicted_ones(two_ranks: RankPool, case: predicted_traffic.Case) -> None:
    """Of a whole run; a plan for fp32 predicts something else."""
    _, pairs = predicted_traffic.compared(two_ranks, case, 2)
    assert predicted_traffic.is_close(pairs), pairs
    whole = plan_of(dataclasses.replace(case, comm=("fp32", "fp32")), 2)
    wrong = predicted_traffic.sent_as_predicted(whole)
    measured = pairs["embeddings"].measured
    assert measured
    assert wrong["embeddings"] > 1.5 * measured


@pytest.mark.parametrize("sharding", ["row_wise", "table_row_wise"])
def test_bytes_within_nodes_and_between_them_are_the_predicted_ones(four_ranks: RankPool, tmp_path, sharding) -> None:
    """Row-wise sums go to the samples' ranks one by one: between nodes more than on a ring."""
    case = predicted_traffic.Case(sharding, "pooled", comm=("int8", "int8"))
    plan = plan_of(case, 4, ranks_per_node=2)
    plan.save(tmp_path / "plan.json")
    of_ranks = four_ranks.run(node_traffic.train, case, tmp_path / "plan.json")
    predicted = node_traffic.as_predicted(plan)
    counted = {key: sum(of_rank[key] for of_rank in of_ranks) / len(of_ranks) for key in predicted}
    assert counted == pytest.approx(predicted, rel=0.02)
    assert (predicted["embeddings", "between"] > predicted["gradients", "between"]) == (sharding == "row_wise")


def test_one_rank_rounds_nothing(one_rank: RankPool) -> None:
    (trained,) = one_rank.run(wire_types.train, CASE)
    (whole,) = one_rank.run(wire_types.train, dataclasses.replace(CASE, comm=("fp32", "fp32")))
    assert trained.sent == whole.sent == SentBytes()
    assert wire_types.differences(trained.final, whole.final) == []


def test_nothing_is_left_of_a_batch(two_ranks: RankPool) -> None:
    assert two_ranks.run(wire_types.exchanges_left, dataclasses.replace(CASE, sharding=MIXED, steps=5)) == [0, 0]


def test_the_benchmark_trains_each_type_and_notes_errors_of_fp32(two_ranks: RankPool) -> None:
    types = ["fp32", "fp16", "int8", "fp8, gradients at random"]
    found, _ = two_ranks.run(wire_types.benchmarked, types)
    whole, half, int8, fp8 = (found["types"][kind]["runs"][0] for kind in types)
    assert whole["embeddings_bytes"] == 2 * half["embeddings_bytes"] == 2 * int8["embeddings_bytes"], "4 columns"
    assert int8["gradients_bytes"] == fp8["gradients_bytes"] < whole["gradients_bytes"]
    assert found["errors"]["auc"] == whole["auc"]
    for kind in ("embeddings", "gradients"):
        errors = [found["errors"][kind][each]["mean_relative"] for each in ("fp16", "int8", "fp8")]
        assert 0 < errors[0] < errors[1] < errors[2] < 0.1


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        ("features of other batch sizes", "whose features differ in their number of samples, with an 8-bit type"),
        ("TorchRec's own sharder", "qcomm_codecs_registry of TorchRec's own sharder, which cannot send 8-bit rows"),
        ("data_parallel", "which are exchanged by RowsOutput"),
    ],
)
def test_what_cannot_travel_as_bytes_is_refused_on_every_rank(two_ranks: RankPool, problem: str, words: str) -> None:
    for message in two_ranks.run(wire_types.message_of, problem):
        assert words in message
