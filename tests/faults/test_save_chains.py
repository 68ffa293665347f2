"""A sample of `python -m tests.faults.save_chains`: kills at file operations of saves, compactions and prunings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from embershard.distributed.checkpoint import chain
from tests.faults.save_chains import Schedules, bounded_disk
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.matrix  # processes that are killed; saves of what changed have tests without kills

NUM_POINTS = 20


@pytest.fixture(scope="module")
def schedules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Schedules]:
    found = Schedules(tmp_path_factory.mktemp("kills"))
    yield found
    found.close()


@pytest.mark.parametrize("number", range(NUM_POINTS))
def test_a_kill_at_a_file_operation(schedules: Schedules, number: int) -> None:
    kind, at = schedules.points(NUM_POINTS)[number]
    assert schedules.try_one(kind, at) == ""


def test_what_a_pruning_without_ancestors_leaves_is_noticed(schedules: Schedules) -> None:
    """A negative control: the last kill of a run would leave saves without what they follow."""
    with mock.patch.object(chain, "needed_by", set):
        found = [schedules.try_one("save", schedules.operations["save"] * share // 10) for share in (9, 8)]
    assert any("it follows" in problem or "ended with status" in problem for problem in found), found


def test_the_disk_is_bounded(tmp_path: Path) -> None:
    """`python -m tests.faults.save_chains --schedules 0 --steps 20000` trains longer."""
    pool = RankPool(1)
    try:
        assert pool.run(bounded_disk, tmp_path, 30) == [[]]
    finally:
        pool.close()
