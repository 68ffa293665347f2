"""Every plan on any number of ranks starts from the same weights, and no reader sees a row that was not made."""

from __future__ import annotations

import pytest
import torch

from tests.covering import keep, matrix
from tests.ranks import initial_weights
from tests.ranks.parity import Case
from tests.ranks.test_exactness import POOLED, VARIANTS
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

LARGE = (60_000, 500, 90_000, 333)
PLANS = {
    **{sharding: Case(sharding=sharding) for sharding in POOLED},
    "sequence": Case(sequence=True, sharding="row_wise"),
    "sequence_column_wise": Case(sequence=True, sharding="column_wise"),
    **{
        name: VARIANTS[name]
        for name in (
            "mixed_sharding",
            "beside_stock_tables",
            "beside_data_parallel_tables",
            "fp16_beside_fp32",
            "different_dims_column_wise",
            "tables_that_stay",
        )
    },
}


@pytest.mark.parametrize("name", keep(["row_wise", "grid_shard", "sequence_column_wise", "fp16_beside_fp32"], PLANS))
def test_every_plan_starts_from_the_tables_made_at_once(two_ranks: RankPool, name: str) -> None:
    found = two_ranks.run(initial_weights.wrong_shards, PLANS[name])
    assert [wrong for wrong, _ in found] == [[], []]
    assert sum(compared for _, compared in found) >= 8


def test_one_rank_does_too(one_rank: RankPool) -> None:
    """Four ranks on two nodes are in `test_exactness.py`, whose processes they share."""
    for sharding in ("table_wise", "row_wise", "column_wise"):
        assert one_rank.run(initial_weights.wrong_shards, Case(sharding=sharding))[0][0] == []


@pytest.mark.parametrize(
    "case",
    [
        matrix(Case(rows=LARGE, ratio=0.25, steps=12)),
        matrix(Case(rows=LARGE, ratio=0.25, steps=12, sharding="row_wise", policy="lru", optimizer="adagrad")),
        Case(rows=LARGE, ratio=0.25, steps=4, sharding="column_wise", profile=True, evaluate_every=3),
        matrix(Case(rows=LARGE, ratio=0.25, steps=12, sharding="row_wise", sequence=True)),
        Case(rows=LARGE, ratio=0.25, steps=12, fp16=(0, 1, 2, 3), optimizer="sgd", transfer="staged"),
    ],
)
def test_training_on_lazy_rows_equals_stock_from_the_same_weights(two_ranks: RankPool, case: Case) -> None:
    found = two_ranks.run(initial_weights.compare_lazy, case)
    assert [outcome.different for outcome, _ in found] == [[], []]
    assert sum(left for _, left in found) > 50, "nothing was lazy"


def test_which_ways_of_reading_make_rows(two_ranks: RankPool) -> None:
    for found in two_ranks.run(initial_weights.ways_of_reading, Case(rows=LARGE, ratio=0.25, sharding="row_wise")):
        whole = found["evaluation, before"]
        assert {found[key] for key in found if key.endswith("before")} == {whole}, "building a model made rows"
        assert 0 < found["evaluation"] < whole
        assert found["optimizer state"] == whole
        assert [found[way] for way in ("state dict", "flush", "weight", "load of the dense part")] == [0] * 4
        assert all(found[way] for way in found if way.endswith("right"))


def test_a_checkpoint_of_a_lazy_model_is_that_of_an_eager_one(two_ranks: RankPool) -> None:
    case = Case(rows=LARGE, ratio=0.25, sharding=("row_wise", "table_wise", "column_wise", "table_wise"))
    assert two_ranks.run(initial_weights.checkpoint_of_a_lazy_model, case) == [[], []]


def test_writes_before_all_rows_are_made_are_refused(two_ranks: RankPool) -> None:
    case = Case(rows=LARGE, ratio=0.25, sharding="row_wise")
    for without, after_flush in two_ranks.run(initial_weights.writes_before_rows_are_made, case):
        assert "written to before all rows had their initial weights" in without
        assert after_flush == ""


def test_another_seed_gives_other_weights(two_ranks: RankPool) -> None:
    """Negative control of the comparisons above."""
    for wrong, compared in two_ranks.run(initial_weights.wrong_shards, Case(sharding="row_wise"), 12):
        assert len(wrong) == compared == 8


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("precision", "close"), [matrix("fp32", initial_weights.CLOSE), ("fp64", initial_weights.CLOSE_IN_FP64)]
)
def test_losses_do_not_depend_on_the_number_of_ranks(one_rank, two_ranks, precision, close) -> None:
    """Not bitwise: two ranks add the gradients of half batches. Four ranks are in `test_exactness.py`."""
    ((losses, dense),) = one_rank.run(initial_weights.run_of_global_batches, precision)
    found = two_ranks.run(initial_weights.run_of_global_batches, precision)
    assert len(losses) == initial_weights.STEPS
    assert losses[-1] < losses[0] - 0.001
    for others, layers in found:
        assert others == pytest.approx(losses, abs=close, rel=0)
        assert all(torch.equal(a, b) for a, b in zip(dense, layers, strict=True))


@pytest.mark.matrix
def test_two_nodes_of_one_rank_equal_one_node_of_two(two_ranks: RankPool) -> None:
    """Bit for bit, although TorchRec cuts the tables otherwise."""
    nodes = RankPool(2, local_world_size=1)
    try:
        found = nodes.run(initial_weights.run_of_global_batches)
    finally:
        nodes.close()
    (losses, _), _ = two_ranks.run(initial_weights.run_of_global_batches)
    assert [others for others, _ in found] == [losses, losses]
