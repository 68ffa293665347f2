"""A sample of `python -m tests.faults.random_runs`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.covering import matrix
from tests.faults.random_lives import CONTROLS
from tests.faults.random_runs import Tally, try_run
from tests.faults.rank_kills import Pools

pytestmark = pytest.mark.slow  # processes that are killed


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(12))
def test_a_run_that_is_killed_is_as_a_plain_training(pools: Pools, tmp_path: Path, seed: int) -> None:
    assert try_run(seed, tmp_path, pools, Tally()) == ""


@pytest.mark.parametrize("control", [*map(matrix, CONTROLS)])
def test_what_a_resume_forgets_is_noticed(pools: Pools, tmp_path: Path, control: str) -> None:
    assert "--seed 5: loss at step" in try_run(5, tmp_path, pools, Tally(), control)
