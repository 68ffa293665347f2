"""Chains of saves equal whole saves of the same states, bit for bit: every mode; resumes on other ranks and plans."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from embershard.commands.ckpt import differences
from embershard.distributed import Manifest, complete_checkpoints
from tests.covering import keep, matrix
from tests.ranks import resharding, save_chains, test_trained_ids
from tests.ranks.resharding import Layout
from tests.ranks.save_chains import EVERY, FULL_EVERY, STEPS, Saved
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

KINDS: dict[str, str | Layout] = {
    "row-wise, look-ahead": Layout(ratio=0.3, policy="lookahead", lookahead=3),
    "table-wise, Adagrad": Layout("table_wise", ratio=0.2, optimizer="adagrad"),
    "column-wise": Layout("column_wise", ratio=0.2),
    "rows": Layout(ratio=0.5, exchange="rows"),
    "no cache": Layout("table_wise", kernel="device"),
    "data_parallel": Layout(ratio=0.5, mode="data_parallel"),
    "hot_cold": Layout(ratio=0.2, mode="hot_cold"),
    "SGD": Layout(ratio=0.2, optimizer="sgd"),
    "replicated": "replicated",
    "ids": "ids",
}
NUM_SAVES = STEPS // EVERY
#: Of saves 0, 1, ...: those that are not whole.
DELTAS = [EVERY * (number + 1) for number in range(NUM_SAVES) if number % FULL_EVERY]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_samples(tmp_path)


def with_samples(folder: Path) -> Path:
    resharding.write_samples(folder / "samples.parquet")
    test_trained_ids.write_clicks(folder)
    return folder


COMMON = "row-wise, look-ahead"


@pytest.fixture(scope="module")
def common(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The samples, a chain and whole saves of a training, which tests copy."""
    folder = with_samples(tmp_path_factory.mktemp("common"))
    two_ranks.run(save_chains.train, KINDS[COMMON], folder)
    return folder


def different(folder: Path, chain: str = "chain", whole: str = "whole") -> list[str]:
    """The tensors of chains that are not those of the whole saves, by step."""
    found = []
    for saved in complete_checkpoints(folder / whole):
        found += [f"{saved.name} {name}" for name, *_ in differences(folder / chain / saved.name, saved)]
    return [name for name in found if not name.endswith(" run")]


def check(kind: str | Layout, found: list[Saved]) -> None:
    assert all(each.deltas == DELTAS and each.num_saves == NUM_SAVES for each in found)
    if not isinstance(kind, Layout) or kind.kernel == "cached":
        assert sum(each.evictions for each in found) > 100


@pytest.mark.parametrize("name", keep(["column-wise"], KINDS))
def test_a_chain_equals_whole_saves(two_ranks: RankPool, folder: Path, name: str) -> None:
    check(KINDS[name], two_ranks.run(save_chains.train, KINDS[name], folder))
    assert different(folder) == []


@pytest.mark.parametrize("fault", [*map(matrix, save_chains.FAULTS)])
def test_planted_faults_are_noticed(two_ranks: RankPool, folder: Path, fault: str) -> None:
    """Beside publications, which have marks of their own. (A delta whose marks were all cleared has no rows.)"""
    found = two_ranks.run(save_chains.train, KINDS[COMMON], folder, fault, True)
    assert all(each.num_saves == NUM_SAVES for each in found)
    assert different(folder)


@pytest.mark.matrix
def test_publications_take_no_marks(two_ranks: RankPool, folder: Path) -> None:
    kind = KINDS[COMMON]
    check(kind, two_ranks.run(save_chains.train, kind, folder, "", True))
    assert different(folder) == []


@pytest.mark.matrix
@pytest.mark.parametrize("name", keep([COMMON], [COMMON, "hot_cold", "ids"]))
def test_beside_training_the_state_of_its_step(two_ranks: RankPool, folder: Path, common: Path, name: str) -> None:
    kind = KINDS[name]
    if name == COMMON:
        shutil.copytree(common, folder, dirs_exist_ok=True)
    else:
        two_ranks.run(save_chains.train, kind, folder)
    found = two_ranks.run(save_chains.train_beside, kind, folder)
    check(kind, found)
    assert max(each.num_aside for each in found) > 0
    assert different(folder, "beside") == []


ELSEWHERE = {
    "one rank": ("one_rank", Layout("table_wise", ratio=0.3, policy="lru")),
    "one rank, other states": ("one_rank", Layout("column_wise", ratio=0.3)),
    "no cache": ("two_ranks", Layout("table_wise", kernel="device")),
    "data_parallel": ("two_ranks", Layout(ratio=0.5, mode="data_parallel")),
    "hot_cold": ("two_ranks", Layout(ratio=0.4, mode="hot_cold")),
}


@pytest.mark.parametrize("name", keep(["one rank"], ELSEWHERE))
def test_a_chain_goes_on_elsewhere(request, common: Path, tmp_path: Path, name: str) -> None:
    """The first save there follows what was loaded, with rows cut otherwise; but not where states have another shape,
    or all tables are small."""
    pool, layout = request.getfixturevalue(ELSEWHERE[name][0]), ELSEWHERE[name][1]
    folder = shutil.copytree(common, tmp_path / "elsewhere")
    begins = DELTAS[1]
    for saved in complete_checkpoints(folder / "chain"):
        if int(saved.name.removeprefix("step_")) > begins:
            shutil.rmtree(saved)
    pool.run(save_chains.go_on, layout, folder, begins)
    parent = Manifest.read(folder / "chain" / f"step_{begins + EVERY}").parent
    assert (parent is None) == (name in ("one rank, other states", "no cache"))
    found = different(folder, whole="elsewhere")
    groups = ("model.", "embedding_optimizer.", "dense_optimizer.")  # caches and generators begin anew
    of_rows = [each for each in found if each.partition(" ")[2].startswith(groups)]
    if name == "one rank, other states":  # row-wise states of the loaded step are per row, those now per column shard
        of_rows = [each for each in of_rows if not each.startswith(f"step_{begins} ")]
    assert of_rows == []
