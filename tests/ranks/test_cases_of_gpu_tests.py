"""What tests/gpu trains on a GPU, on the CPU: the cases are sound, and the judgement can be made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.gpu import cases
from tests.ranks import commands
from tests.ranks.workers import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.matrix]


@pytest.mark.parametrize("name", [*cases.MODES, *cases.REPLICATED])
@pytest.mark.parametrize(("ranks", "num_ranks"), [("one_rank", 1), ("two_ranks", 2)])
def test_modes(name: str, ranks: str, num_ranks: int, request: pytest.FixtureRequest) -> None:
    pool: RankPool = request.getfixturevalue(ranks)
    cases.check_mode(pool, name, "cpu", num_ranks)


def test_many_uses_of_a_row(one_rank: RankPool) -> None:
    cases.check_many_uses(one_rank, "cpu")


@pytest.mark.parametrize("name", cases.SMALL_ROWS)
def test_small_rows(one_rank: RankPool, name: str) -> None:
    cases.check_small_rows(one_rank, name, "cpu")


@pytest.mark.parametrize("name", cases.RUNS)
def test_runs(one_rank: RankPool, name: str, tmp_path: Path) -> None:
    cases.check_run(one_rank, name, tmp_path, "cpu")


def test_publications_and_scores(tmp_path: Path) -> None:
    def embershard(words: Sequence[str]) -> None:
        done = commands.run(words, tmp_path)
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"

    cases.check_publication(embershard, tmp_path, "cpu")
