"""A run that begins with an unchanged model trains what a resume does, but for its position in the data: bit for bit,
on other ranks, in other places, and in other modes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.covering import keep
from tests.ranks import resharding, warm_starts
from tests.ranks.resharding import Layout
from tests.ranks.test_resharding import tensors_that_differ
from tests.ranks.warm_starts import MORE, SAVED_AT
from tests.ranks.workers import RankPool

pytestmark = [pytest.mark.extra, pytest.mark.ranks]


@pytest.fixture(scope="module")
def folder(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples, and a run on two ranks with cached row-wise tables."""
    made = tmp_path_factory.mktemp("warm_starts")
    resharding.write_samples(made / "samples.parquet")
    two_ranks.run(warm_starts.train, Layout(), made)
    return made


def different(pool: RankPool, layout: Layout, folder: Path, copies: Path, control: str = "") -> list[str]:
    """The tensors that differ between a start and a resume, some steps later."""
    for how in ("start", "resume"):
        pool.run(_go_on, layout, folder, copies / how, how, control)
    ends = copies / "start" / f"step_{MORE}", copies / "resume" / f"step_{SAVED_AT + MORE}"
    return tensors_that_differ(*ends)


def _go_on(layout: Layout, folder: Path, copy: Path, how: str, control: str) -> None:
    warm_starts.go_on(layout, folder, copy, how=how, control=control)


LAYOUTS = {
    "the same": Layout(),
    "table-wise, look-ahead": Layout("table_wise", policy="lookahead", lookahead=3),
    "smaller cache, lru": Layout(ratio=0.3, policy="lru"),
    "columns": Layout("column_wise"),
    "resident": Layout(kernel="device"),
    "data-parallel": Layout(mode="data_parallel", ratio=0.7),
    "hot and cold": Layout(mode="hot_cold"),
    "rows exchanged": Layout(exchange="rows"),
    "small rows": Layout("column_wise", ratio=0.3, host_dtype="int8"),
    "small rows, row-wise": Layout(ratio=0.3, host_dtype="fp16"),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", keep(["small rows"], LAYOUTS))
def test_as_a_resume_without_its_position(two_ranks: RankPool, folder: Path, tmp_path: Path, name: str) -> None:
    assert different(two_ranks, LAYOUTS[name], folder, tmp_path) == []


def test_on_one_rank(one_rank: RankPool, folder: Path, tmp_path: Path) -> None:
    assert different(one_rank, Layout("table_wise"), folder, tmp_path) == []


@pytest.mark.parametrize("sharding", keep(["row_wise"], ["row_wise", "column_wise"]))
@pytest.mark.parametrize("host_dtype", keep(["int8"], ["int8", "fp16"]))
def test_small_rows_are_the_saved_ones_rounded(
    two_ranks: RankPool, folder: Path, sharding: str, host_dtype: str
) -> None:
    layout = Layout(sharding, host_dtype=host_dtype)
    of_ranks = two_ranks.run(warm_starts.shards_not_rounded, layout, folder)
    assert [found for found, _ in of_ranks] == [[], []]
    assert sum(count for _, count in of_ranks) == 2 * len(resharding.ROWS)


@pytest.mark.matrix  # as on one rank: other shards than were saved
def test_on_four_ranks(four_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    assert different(four_ranks, Layout(), folder, tmp_path) == []


@pytest.mark.matrix
@pytest.mark.parametrize("optimizer", ["adagrad", "sgd"])
def test_other_optimizers(two_ranks: RankPool, tmp_path: Path, optimizer: str) -> None:
    resharding.write_samples(tmp_path / "samples.parquet")
    two_ranks.run(warm_starts.train, Layout("column_wise", optimizer=optimizer), tmp_path)
    assert different(two_ranks, Layout(optimizer=optimizer), tmp_path, tmp_path / "copies") == []


@pytest.mark.matrix
def test_states_that_are_forgotten_are_found(two_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    found = different(two_ranks, Layout(), folder, tmp_path, control="states")
    assert len(found) > len(resharding.ROWS)
