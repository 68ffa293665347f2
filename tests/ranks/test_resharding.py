"""A run goes on from a checkpoint on other ranks, in other places, with other caches, and without any; and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embershard.commands.ckpt import differences
from tests.covering import keep, matrix
from tests.ranks import resharding
from tests.ranks.resharding import BATCH, SAVED_AT, STEPS, Layout
from tests.ranks.rounding import loss_rounding
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

#: Largest difference of losses on another number of ranks, whose gradients are added in another order. On as many ranks
#: as before, the losses are equal.
CLOSE = loss_rounding(STEPS - SAVED_AT, BATCH)
CLOSE_IN_FP64 = loss_rounding(STEPS - SAVED_AT, BATCH, torch.float64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("resharding")
    resharding.write_samples(made / "samples.parquet")
    return made


@pytest.fixture(scope="module")
def whole(two_ranks: RankPool, folder: Path) -> list[float]:
    """Losses of a run on two ranks, with cached row-wise tables."""
    return two_ranks.run(resharding.run, Layout(), folder)[0]


@pytest.fixture(scope="module")
def whole_in_fp64(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Folder and losses of such a run whose dense layers compute in float64."""
    made = tmp_path_factory.mktemp("fp64")
    resharding.write_samples(made / "samples.parquet")
    return made, two_ranks.run(resharding.run, Layout(precision="fp64"), made)[0]


def tensors_that_differ(first: Path, second: Path) -> list[str]:
    groups = ("model.", "embedding_optimizer.", "dense_optimizer.")
    return [name for name, *_ in differences(first, second) if name.startswith(groups)]


def go_on(pool: RankPool, layout: Layout, folder: Path, copy: Path, forget: str = "") -> tuple[list[str], list[float]]:
    """The tensors that are not as saved once they were loaded in the layout, and the losses after that."""
    saved = folder / "whole" / f"step_{SAVED_AT}"
    losses = pool.run(resharding.go_on, layout, folder, saved, copy, forget)[0]
    assert len(losses) == STEPS - SAVED_AT
    return tensors_that_differ(saved, copy / saved.name), losses


ON_TWO = {
    "smaller cache, lru": Layout(ratio=0.3, policy="lru"),
    "look-ahead": Layout(policy="lookahead", lookahead=3),
    "table-wise": Layout("table_wise"),
    "resident": Layout(kernel="device"),
    "resident, table-wise": Layout("table_wise", kernel="device"),
}


@pytest.mark.parametrize("name", keep(["smaller cache, lru"], ON_TWO))
def test_on_as_many_ranks(two_ranks: RankPool, folder: Path, whole: list[float], tmp_path: Path, name: str) -> None:
    assert go_on(two_ranks, ON_TWO[name], folder, tmp_path) == ([], whole[SAVED_AT:])


@pytest.mark.matrix
def test_small_rows_that_are_exchanged_go_on(two_ranks: RankPool, tmp_path: Path) -> None:
    resharding.write_samples(tmp_path / "samples.parquet")
    layout = Layout(host_dtype="int8", exchange="rows", ratio=0.3, steps=2 * SAVED_AT)
    losses = two_ranks.run(resharding.run, layout, tmp_path)[0]
    saved, copy = tmp_path / "whole" / f"step_{SAVED_AT}", tmp_path / "copy"
    assert two_ranks.run(resharding.go_on, layout, tmp_path, saved, copy)[0] == losses[SAVED_AT:]
    assert tensors_that_differ(saved, copy / saved.name) == []


@pytest.mark.matrix
def test_data_parallel_and_back(two_ranks: RankPool, folder: Path, whole: list[float], tmp_path: Path) -> None:
    """Data-parallel tables add gradients up in another order; what they load and save is exact."""
    layout = Layout(mode="data_parallel", policy="lookahead", lookahead=3)
    different, losses = go_on(two_ranks, layout, folder, tmp_path / "a")
    assert (different, losses) == ([], pytest.approx(whole[SAVED_AT:], rel=0, abs=CLOSE))
    copy = tmp_path / "a" / f"step_{SAVED_AT}"
    assert two_ranks.run(resharding.go_on, Layout(), folder, copy, tmp_path / "b")[0] == whole[SAVED_AT:]


@pytest.mark.parametrize("forget", [matrix("states"), matrix("position")])
def test_what_is_not_loaded_is_noticed(two_ranks, folder, whole, tmp_path, forget) -> None:
    different, losses = go_on(two_ranks, Layout(), folder, tmp_path, forget)
    assert len(different) == (4 if forget == "states" else 0)
    assert losses != pytest.approx(whole[SAVED_AT:], rel=0, abs=100 * CLOSE)


def test_on_one_rank_and_back(one_rank, two_ranks, folder, whole, tmp_path) -> None:
    different, losses = go_on(one_rank, Layout("table_wise", policy="lru"), folder, tmp_path / "a")
    assert (different, losses) == ([], pytest.approx(whole[SAVED_AT:], rel=0, abs=CLOSE))
    copy = tmp_path / "a" / f"step_{SAVED_AT}"
    assert two_ranks.run(resharding.go_on, Layout(), folder, copy, tmp_path / "b")[0] == whole[SAVED_AT:]


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", ["one_rank", "four_ranks"])
def test_in_float64_losses_do_not_depend_on_the_number_of_ranks(request, whole, whole_in_fp64, tmp_path, ranks) -> None:
    """float32 gradients, added in another order, are the only cause of different losses."""
    folder, losses = whole_in_fp64
    layout = Layout("table_wise", policy="lookahead", lookahead=3, precision="fp64")
    different, found = go_on(request.getfixturevalue(ranks), layout, folder, tmp_path)
    assert (different, found) == ([], pytest.approx(losses[SAVED_AT:], rel=0, abs=CLOSE_IN_FP64))
    assert losses != pytest.approx(whole, rel=0, abs=100 * CLOSE_IN_FP64)  # the bound tells both formats apart


def test_stock_torchrec_reads_ours_and_we_read_its(two_ranks, folder, whole, tmp_path) -> None:
    assert whole
    checkpoint = folder / "whole" / f"step_{SAVED_AT}"
    arguments = folder, checkpoint, tmp_path / "stock", Layout("table_wise")
    for num_compared, different in two_ranks.run(resharding.through_stock, *arguments):
        assert (num_compared > 8, different) == (True, [])


@pytest.mark.matrix  # on one and two ranks: above
def test_on_four_ranks(four_ranks: RankPool, folder: Path, whole: list[float], tmp_path: Path) -> None:
    layout = Layout("table_row_wise", policy="lookahead", lookahead=3)
    assert go_on(four_ranks, layout, folder, tmp_path) == ([], pytest.approx(whole[SAVED_AT:], rel=0, abs=CLOSE))


@pytest.mark.matrix
def test_a_state_per_row_is_kept_per_column_shard(two_ranks, folder, whole, tmp_path) -> None:
    """Row-wise Adagrad's; training by columns then differs from training by rows, and back by rows it is the same."""
    different, losses = go_on(two_ranks, Layout("column_wise"), folder, tmp_path / "a")
    assert {name.rpartition(".")[2] for name in different} == {"momentum1"}
    assert losses[:8] == pytest.approx(whole[SAVED_AT : SAVED_AT + 8], abs=0.01)
    copy = tmp_path / "a" / f"step_{SAVED_AT}"
    assert two_ranks.run(resharding.go_on, Layout(), folder, copy, tmp_path / "b")[0] == whole[SAVED_AT:]
