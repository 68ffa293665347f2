"""A sample of `python -m tests.faults.publications` and `python -m tests.faults.published_trainings`: lives that are
killed at file operations of publications, and what replicas have after them."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from embershard.extras.serving.serving_replica import Replica
from tests.covering import keep, matrix
from tests.faults import published_trainings
from tests.faults.published_lives import Life, live
from tests.faults.published_trainings import OF_DELTAS, DiffersError, Tally
from tests.faults.rank_kills import Pools
from tests.ranks import commands, resharding
from tests.ranks.resharding import Layout

pytestmark = [pytest.mark.extra, pytest.mark.slow]

MODES = {
    "rows": Layout(exchange="rows", ratio=0.3, lookahead=4, policy="lookahead"),
    "rows, by columns": Layout("column_wise", exchange="rows", ratio=0.3),
    "data_parallel": Layout(mode="data_parallel", ratio=0.4),
    "data_parallel, look-ahead": Layout(mode="data_parallel", ratio=0.5, lookahead=4, policy="lookahead"),
    "hot_cold": Layout(mode="hot_cold", ratio=0.4),
    "hot_cold, look-ahead": Layout(mode="hot_cold", ratio=0.5, lookahead=4, policy="lookahead"),
}
BY_COLUMNS = "rows, by columns", 1  # needs two ranks


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(scope="module")
def runs(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs that published after each step."""
    folder = tmp_path_factory.mktemp("runs")
    return [published_trainings.whole_run(folder / str(number), pools, number) for number in range(2)]


@pytest.mark.parametrize("seed", [10, *map(matrix, range(11, 16))])
def test_real_trainings_that_are_killed(pools: Pools, runs: list[Path], tmp_path: Path, seed: int):
    shutil.copy(runs[0] / "dense.pt2", tmp_path)
    assert published_trainings.try_schedule(seed, tmp_path, pools, Tally()) == ""


@pytest.mark.parametrize("control", OF_DELTAS)
def test_a_wrong_delta_changes_nothing(runs: list[Path], control: str):
    for seed in range(10):
        assert published_trainings.refuses(control, *runs, random.Random(seed)) == ""


def _whole_life(pools: Pools, runs: list[Path], folder: Path, life: Life) -> None:
    resharding.write_samples(folder / "samples.parquet")
    shutil.copy(runs[0] / "dense.pt2", folder)
    ended = pools.run(life.ranks, live, folder, life, False)
    assert ended is not None
    assert sum(evictions for evictions, _ in ended) > 0
    published_trainings.compare(folder, Replica(folder / "published"), Tally())


@pytest.mark.parametrize(
    ("mode", "ranks"),
    [
        ("rows", 2), ("data_parallel", 2), ("hot_cold", 2), ("hot_cold, look-ahead", 1), matrix("hot_cold", 1),
        *(
            matrix(mode, ranks) for mode in MODES if "," in mode for ranks in (1, 2)
            if (mode, ranks) not in (BY_COLUMNS, ("hot_cold, look-ahead", 1))
        ),
    ],
)  # fmt: skip
def test_replicas_have_the_rows_of_every_mode(pools, runs, tmp_path, mode, ranks):
    _whole_life(pools, runs, tmp_path, Life(MODES[mode], ranks))


@pytest.mark.parametrize("mode", keep(["hot_cold"], ["hot_cold", "data_parallel", "rows"]))
@pytest.mark.parametrize("fault", ["", "no correction"])
def test_a_resume_in_every_mode_takes_back_what_it_does_not_have(pools, runs, tmp_path, mode, fault):
    """From step 4, where replicas had 14, on one rank: each delta after it is compared."""
    tally = Tally()
    _whole_life(pools, runs, tmp_path, Life(MODES[mode], 2))
    follower = published_trainings.follow(tmp_path, None, tally)
    for step in (8, 12, 14):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{step}")
    assert pools.run(1, live, tmp_path, Life(MODES[mode], 1, broken=fault), True)
    with pytest.raises(DiffersError) if fault else nullcontext():
        published_trainings.follow(tmp_path, follower, tally)
        assert follower.have.name == "delta_12"
        assert "bases taken in place of deltas" not in tally.kinds


@pytest.mark.parametrize("ranks", keep([2], (1, 2)))
def test_hot_rows_that_are_not_tracked_are_noticed(pools, runs, tmp_path, ranks):
    with pytest.raises(AssertionError, match="differs at delta_"):
        _whole_life(pools, runs, tmp_path, Life(MODES["hot_cold"], ranks, broken="hot rows"))


@pytest.mark.matrix
def test_whole_commands_that_are_killed(tmp_path: Path):
    assert published_trainings.try_command(0, tmp_path) == ""


def _schedules(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return commands.run_program(["tests.faults.publications", *more], folder)


@pytest.mark.parametrize("schedules", keep(["1"], ["1", "8"]))
def test_replicas_differ_in_nothing_after_kills(tmp_path: Path, schedules: str):
    done = _schedules(tmp_path, "--schedules", schedules)
    assert done.returncode == 0, done.stdout
    assert ": 0 wrong" in done.stdout


@pytest.mark.matrix  # tests/ranks/test_publications.py has a resume without the correction
@pytest.mark.parametrize("without", ["correction", "touches"])
def test_what_is_left_out_is_noticed(tmp_path: Path, without: str):
    done = _schedules(tmp_path, "--schedules", "8", "--without", without)
    assert done.returncode == 1, done.stdout
    noticed = [line for line in done.stdout.splitlines() if line.startswith("schedule ")]
    assert noticed
    # A replica serves other values, or refuses changes of a table's ids that do not follow from those it has.
    said = ("differs from the trainer", ": table t_item: it ", "ids have rows with it")
    assert all(any(words in line for words in said) for line in noticed), noticed
