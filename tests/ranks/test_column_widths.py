"""Blocks of columns that differ train, save, resume and send as equal ones do, bit for bit as in stock TorchRec."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from embershard.commands.ckpt import differences
from tests.covering import matrix
from tests.ranks import column_widths, predicted_traffic, resharding
from tests.ranks.column_widths import KINDS, ON_NODES, mixed_plan, without_unequal
from tests.ranks.predicted_traffic import is_close, plan_of, sent_as_predicted
from tests.ranks.resharding import SAVED_AT, Layout
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks


def saved(plan: column_widths.Plan, path: Path) -> Path:
    plan.save(path)
    return path


@pytest.mark.parametrize(
    ("optimizer", "lookahead"), [("rowwise_adagrad", 8), ("sgd", 0), matrix("rowwise_adagrad", 0), matrix("sgd", 8)]
)
def test_they_train_as_stock_torchrec(two_ranks: RankPool, tmp_path: Path, optimizer: str, lookahead: int) -> None:
    plan = mixed_plan(KINDS)
    widths = {(pool.rank, pool.dim) for pool in plan.pools if pool.sharding == "column_wise"}
    assert widths == {(0, 32), (0, 36), (0, 48), (0, 64), (1, 32), (1, 48), (1, 60), (1, 64)}
    for outcome in two_ranks.run(column_widths.compare, saved(plan, tmp_path / "p.json"), optimizer, lookahead):
        assert outcome.different == []
        assert outcome.num_compared > 20
        assert len(outcome.losses) == 13
        assert outcome.cache["evictions"] >= 300, "the case proves nothing"


@pytest.mark.matrix
def test_they_train_as_stock_torchrec_on_nodes(four_ranks: RankPool, tmp_path: Path) -> None:
    plan = mixed_plan(ON_NODES, world_size=4, ranks_per_node=2)
    for outcome in four_ranks.run(column_widths.compare, saved(plan, tmp_path / "p.json"), "rowwise_adagrad", 0):
        assert outcome.different == []
        assert outcome.cache["evictions"] >= 200, "the case proves nothing"


def test_losses_are_those_of_other_cuts_but_where_a_state_is_of_a_block(two_ranks: RankPool, tmp_path: Path) -> None:
    """With SGD no cut changes a bit; row-wise Adagrad has a state for each block, so the comparison can fail."""
    plan = mixed_plan(KINDS)
    paths = [saved(plan, tmp_path / "unequal.json")]
    paths += [saved(without_unequal(plan, kind), tmp_path / f"{kind}.json") for kind in ("column_wise", "table_wise")]
    of_sgd = [two_ranks.run(column_widths.losses, path, "sgd")[0] for path in paths]
    assert of_sgd[0] == of_sgd[1] == of_sgd[2]
    of_rowwise = [two_ranks.run(column_widths.losses, path, "rowwise_adagrad")[0] for path in paths[:2]]
    assert of_rowwise[0] != of_rowwise[1]


STEPS = 2 * SAVED_AT
UNEQUAL = Layout("column_wise", dim=96, columns=(64, 32), ratio=0.3, steps=STEPS)
OTHERS = {
    "equal": dataclasses.replace(UNEQUAL, columns=()),
    "swapped": dataclasses.replace(UNEQUAL, columns=(32, 64)),
    "resident": dataclasses.replace(UNEQUAL, kernel="device"),  # TorchRec's own modules
    "whole": dataclasses.replace(UNEQUAL, columns=(), sharding="table_wise"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("widths")
    resharding.write_samples(made / "samples.parquet")
    return made


def go_on(pool: RankPool, layout: Layout, checkpoint: Path, folder: Path, copy: Path) -> tuple[list[str], list[float]]:
    """Tensors that are not as saved once they were loaded in the layout, and the losses after that."""
    losses = pool.run(resharding.go_on, layout, folder, checkpoint, copy)[0]
    groups = ("model.", "embedding_optimizer.", "dense_optimizer.")
    found = [name for name, *_ in differences(checkpoint, copy / checkpoint.name) if name.startswith(groups)]
    return found, losses


@pytest.mark.parametrize("optimizer", ["sgd", matrix("rowwise_adagrad")])
def test_a_checkpoint_goes_on_in_other_columns(one_rank, two_ranks, folder, tmp_path, optimizer) -> None:
    """Rows are equal bit for bit; losses are with SGD, on as many ranks."""
    layout = dataclasses.replace(UNEQUAL, optimizer=optimizer)
    made = tmp_path / "made"
    made.mkdir()
    (made / "samples.parquet").symlink_to(folder / "samples.parquet")
    whole = two_ranks.run(resharding.run, layout, made)[0]
    checkpoint = made / "whole" / f"step_{SAVED_AT}"
    assert go_on(two_ranks, layout, checkpoint, folder, tmp_path / "same") == ([], whole[SAVED_AT:])
    for name, other in OTHERS.items():
        pool = one_rank if name == "whole" else two_ranks
        other = dataclasses.replace(other, optimizer=optimizer)
        different, losses = go_on(pool, other, checkpoint, folder, tmp_path / name)
        assert not [each for each in different if not each.endswith("momentum1")]
        if optimizer == "sgd":
            assert different == []
            assert losses == (pytest.approx(whole[SAVED_AT:], abs=1e-4) if name == "whole" else whole[SAVED_AT:])
            copy = tmp_path / name / checkpoint.name
            back = go_on(two_ranks, layout, copy, folder, tmp_path / f"{name} and back")
            assert back == ([], whole[SAVED_AT:])


def test_counted_bytes_are_the_predicted_ones(two_ranks: RankPool) -> None:
    case = predicted_traffic.Case("column_wise", "auto", dim=96, columns=(64, 32))
    plan, pairs = predicted_traffic.compared(two_ranks, case, 2)
    assert all(table.exchange == "pooled" for table in plan.tables)
    assert is_close(pairs), pairs
    other = plan_of(dataclasses.replace(case, columns=(), sharding="table_wise", exchange="pooled"), 2)
    wrong = {
        kind: predicted_traffic.Pair(number, pairs[kind].measured) for kind, number in sent_as_predicted(other).items()
    }
    assert not is_close(wrong), "the control: a plan of whole tables predicts something else"


def test_each_rank_sends_what_its_columns_take(two_ranks: RankPool, tmp_path: Path) -> None:
    """With all wide blocks on rank 0 it sends twice the embeddings of rank 1, as predicted; within 2 %."""
    case = predicted_traffic.Case("column_wise", "pooled", dim=96, columns=(64, 32))
    plan = plan_of(case, 2, ranks=(0, 1))
    counted = two_ranks.run(predicted_traffic.train, case, saved(plan, tmp_path / "p.json"))
    for rank, (sent, _) in enumerate(counted):
        work = plan.prediction.ranks[rank].work
        assert sent.embeddings == pytest.approx(work["sent_embedding_bytes"], rel=0.02)
        others = counted[1 - rank][0]  # a plan counts gradients where they arrive, on the rank of the shard
        assert others.gradients == pytest.approx(work["sent_gradient_bytes"], rel=0.02)
    assert counted[0][0].embeddings == pytest.approx(2 * counted[1][0].embeddings, rel=0.01)
