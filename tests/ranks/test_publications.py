"""A replica has the trainer's weights, bit for bit, after real trainings: look-ahead, plans, ranks, resumes."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest

from embershard.distributed.publish.published import published, read_publication
from embershard.extras.publications.compact import make_base
from tests.covering import matrix
from tests.ranks import publications
from tests.ranks.planned import mixed_plan
from tests.ranks.workers import RankPool

pytestmark = [pytest.mark.extra, pytest.mark.ranks]


@pytest.fixture(scope="module")
def whole(one_rank: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, publications.Life]:
    """A life of 12 steps with a look-ahead of 8."""
    folder = tmp_path_factory.mktemp("published")
    (life,) = one_rank.run(publications.live, folder)
    return folder, life


def copied(whole: tuple[Path, publications.Life], folder: Path) -> Path:
    """The folder as a killed run leaves it: a copy, in which the next life publishes."""
    shutil.copytree(whole[0] / "checkpoints", folder / "checkpoints")
    shutil.copytree(whole[0] / "published", folder / "published")
    shutil.copy(whole[0] / "publishes.json", folder)
    return folder


@pytest.mark.smoke
def test_replicas_have_the_trainer_s_weights(whole):
    _, life = whole
    assert (life.different, life.followed, life.problems) == ([], "delta_6", [])
    assert life.evictions > 0
    assert [name for name in life.names if name.startswith("delta")] == [f"delta_{n}" for n in range(1, 7)]
    assert "base_2" in life.names


def test_rows_of_deltas_do_not_depend_on_the_look_ahead(whole, one_rank, tmp_path):
    """Rows are touched by updates: known, prepared or evaluated batches add none."""
    (life,) = one_rank.run(publications.live, tmp_path, 0, 12, None, None, "", "fp32", "lru")
    assert (life.different, life.followed) == ([], "delta_6")
    assert life.evictions > 0
    found, others = publications.keys_of_deltas(tmp_path), publications.keys_of_deltas(whole[0])
    common = found.keys() & others.keys()
    assert {"delta_5", "delta_6"} <= common
    assert all(found[name] == others[name] for name in common)


@pytest.mark.parametrize("broken", ["dirtiness", matrix("slots")])
def test_other_tracking_is_noticed(one_rank, tmp_path, broken):
    (life,) = one_rank.run(_live_with, tmp_path, broken)
    assert life.evictions > 0
    assert life.different


def _live_with(folder: Path, broken: str) -> publications.Life:
    """Rows are written back between two cuts: by evictions."""
    return publications.live(folder, 0, 12, broken=broken, policy="lru", every=6, ratio=0.15)


def test_a_resume_takes_back_what_it_does_not_have(whole, one_rank, tmp_path):
    """From step 4 on it trains to step 6; replicas had step 12."""
    folder = copied(whole, tmp_path)
    (life,) = one_rank.run(publications.live, folder, 0, 6, 4)
    assert (life.different, life.problems) == ([], [])
    assert [name for name in life.names if name.startswith("delta")] == ["delta_7"]


def test_without_the_correction_a_resume_is_noticed(whole, one_rank, tmp_path):
    folder = copied(whole, tmp_path)
    (life,) = one_rank.run(publications.live, folder, 0, 6, 4, None, "no correction")
    assert life.different


def test_a_resume_without_a_delta_writes_a_base(whole, one_rank, tmp_path):
    folder = copied(whole, tmp_path)
    if not (folder / "published" / "base_6").exists():  # base_4 was still being made, beside training
        make_base(folder / "published", 6)
    shutil.rmtree(folder / "published" / "delta_5")
    (life,) = one_rank.run(publications.live, folder, 8, 6, 4)
    assert life.different == []
    assert life.names[0] == "base_7"
    assert "a new base was written" in life.problems[0]


def test_rows_of_half_the_size(one_rank, tmp_path):
    (life,) = one_rank.run(publications.live, tmp_path, 8, 6, None, None, "", "fp16")
    assert life.different == []


@pytest.mark.parametrize("host_dtype", ["int8", "fp16"])
def test_small_host_rows_are_published_as_trained(one_rank, tmp_path, host_dtype):
    """Bases and deltas have the widened rows; so has the next life, which takes back two deltas."""
    small = partial(_live_with_small_rows, host_dtype=host_dtype)
    (life,) = one_rank.run(small, tmp_path)
    assert (life.different, life.followed, life.problems) == ([], "delta_6", [])
    assert life.evictions > 100
    (life,) = one_rank.run(small, tmp_path, 8, 10)
    assert (life.different, life.problems) == ([], [])
    assert [name for name in life.names if name.startswith("delta")] == ["delta_7"]


def test_small_rows_that_are_read_past_their_slots_are_noticed(one_rank, tmp_path):
    (life,) = one_rank.run(partial(_live_with_small_rows, broken="host rows", host_dtype="int8"), tmp_path)
    assert life.different


def _live_with_small_rows(
    folder: Path, start: int | None = None, steps: int = 12, *, broken: str = "", host_dtype: str
) -> publications.Life:
    return publications.live(folder, 8, steps, start, broken=broken, ratio=0.2, host_dtype=host_dtype)


def test_rows_in_a_file_are_published_as_trained(one_rank, tmp_path):
    live = partial(publications.live, ratio=0.1, host_bytes=26_000)
    (life,) = one_rank.run(live, tmp_path, 8, 12)
    assert (life.different, life.followed, life.problems) == ([], "delta_6", [])
    assert life.evictions > 100
    (life,) = one_rank.run(live, tmp_path, 8, 10, 8)
    assert (life.different, life.problems) == ([], [])


def test_two_ranks_of_small_host_rows(two_ranks, tmp_path):
    found = two_ranks.run(partial(_live_with_small_rows, host_dtype="int8"), tmp_path)
    assert [life.different for life in found] == [[], []]
    assert sum(life.evictions for life in found) > 100
    assert found[0].followed == "delta_6"


def test_two_ranks_with_every_kind_of_table(two_ranks, one_rank, tmp_path):
    """By rows, by columns, whole, on the device and on all ranks; and a resume on one rank, without the plan."""
    plan = mixed_plan(["row_wise", "column_wise", "table_wise"], 2, 2)
    plan.save(tmp_path / "plan.json")
    found = two_ranks.run(publications.live, tmp_path, 8, 8, None, tmp_path / "plan.json", "", "fp32", "lookahead", 20)
    assert [life.different for life in found] == [[], []]
    assert sum(life.evictions for life in found) > 0
    assert found[0].followed == "delta_4"
    (life,) = one_rank.run(_resume_on_one, tmp_path)
    assert (life.different, life.problems) == ([], [])
    assert [name for name in life.names if name.startswith("delta")] == ["delta_5"]


def _resume_on_one(folder: Path) -> publications.Life:
    return publications.live(folder, 8, 6, 4, batch=20)


@pytest.mark.parametrize("lookahead", [8, matrix(0)])
def test_groups_publish_rows_once_and_when_they_are_equal(four_ranks, tmp_path, lookahead):
    """Behind the average after the step that is due: of steps 2, 4, 6, ... at 3, 6, 9 and 12, where a save comes, too.
    The next life goes on from step 9, and takes back what replicas have of later steps."""
    live = partial(publications.live, batch=24, groups=(2, 3))
    found = four_ranks.run(live, tmp_path, lookahead)
    assert [life.different for life in found] == [[]] * 4
    assert found[0].followed == "delta_4"
    assert sum(life.evictions for life in found) > 100
    deltas = [read_publication(path) for _, path in published(tmp_path / "published", "delta")]
    assert {delta.step for delta in deltas} <= {3, 6, 9, 12}
    assert deltas[-1].step == 12
    keys = publications.keys_of_deltas(tmp_path)
    assert [delta.num_rows for delta in deltas] == [sum(map(len, keys[delta.name].values())) for delta in deltas]
    found = four_ranks.run(live, tmp_path, lookahead, 11, 9)
    assert [life.different for life in found] == [[]] * 4
    assert found[0].problems == []


def test_groups_whose_averages_publications_do_not_hear_of_are_noticed(two_ranks, tmp_path):
    """Control: rows that the second group alone has trained."""
    found = two_ranks.run(partial(publications.live, groups=(2, 3), broken="averages"), tmp_path)
    assert all(life.different for life in found)
