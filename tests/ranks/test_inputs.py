"""Input that is damaged on one rank, or changes under all: the run saves, and every rank ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from embershard.data import DataConfig, TableConfig, TableFeature, open_source
from tests.covering import matrix
from tests.ranks import inputs
from tests.ranks.rounding import loss_rounding
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("lookahead", [matrix(0), 4])
def test_a_bad_row_of_one_rank_ends_all_after_a_checkpoint(two_ranks: RankPool, tmp_path: Path, lookahead: int):
    inputs.write_clicks(tmp_path / "day_0", bad=(251,))  # the second half of global batch 12
    run = inputs.config(tmp_path / "day_0", lookahead)
    first, second = two_ranks.run(inputs.train, run, tmp_path / "saved")
    assert first["steps"] == second["steps"]
    assert first["steps"] in range(12 - lookahead - 2, 13)
    assert first["saved"] == [f"step_{first['steps']}"]
    assert "day_0:252 C26='zebra'" in second["error"]
    assert first["error"].startswith("DataError: the input of rank 1 failed, so all ranks stop")


@pytest.mark.parametrize("lookahead", [matrix(0), 4])
def test_a_truncated_file_ends_the_run_and_a_repaired_one_lets_it_go_on(
    two_ranks: RankPool, tmp_path: Path, lookahead: int
):
    path = tmp_path / "day_0"
    inputs.write_clicks(path)
    run, whole, status = inputs.config(path, lookahead), path.read_bytes(), path.stat()
    wanted = two_ranks.run(inputs.train, run, tmp_path / "whole")[0]
    assert (len(wanted["losses"]), wanted["error"]) == (18, "")
    stopped = two_ranks.run(inputs.train, run, tmp_path / "saved", False, 3)
    steps = stopped[0]["steps"]
    for found in stopped:
        assert (found["steps"], found["saved"]) == (steps, [f"step_{steps}"])
        assert 3 <= steps < 18
        assert "day_0: changed while it was read, at byte" in found["error"] or "input of rank" in found["error"]
    path.write_bytes(whole)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    resumed = two_ranks.run(inputs.train, run, tmp_path / "saved", True)[0]
    assert stopped[0]["losses"] + resumed["losses"] == wanted["losses"]


def test_bad_rows_are_dropped_alike_on_one_rank_and_on_two(one_rank: RankPool, two_ranks: RankPool, tmp_path: Path):
    path, bad = tmp_path / "day_0", (3, 100, 101, 250, 350, 399)
    inputs.write_clicks(path, bad)
    run = inputs.config(path, lookahead=4, bad_rows=0.1, shuffle=True)
    alone = one_rank.run(inputs.train, run, tmp_path / "alone")[0]
    together = two_ranks.run(inputs.train, run, tmp_path / "together")[0]
    assert alone["error"] == together["error"] == ""
    assert together["losses"] == pytest.approx(alone["losses"], rel=0, abs=loss_rounding(18, inputs.GLOBAL_BATCH))
    for found in (alone, together):
        assert (found["bad"], found["rows"], found["held_out"]) == (6, {row + 1 for row in bad}, 39)
    other = tmp_path / "other"
    inputs.write_clicks(other)
    clean = two_ranks.run(inputs.train, inputs.config(other, lookahead=4, shuffle=True), tmp_path / "clean")[0]
    assert clean["losses"] != together["losses"]


def test_too_many_bad_rows_end_all_ranks_at_the_same_step(two_ranks: RankPool, tmp_path: Path):
    inputs.write_clicks(tmp_path / "day_0", bad=tuple(range(100, 300, 20)))
    run = inputs.config(tmp_path / "day_0", lookahead=0, bad_rows=0.01)
    first, second = two_ranks.run(inputs.train, run, tmp_path / "saved")
    assert first["error"] == second["error"]
    assert "4 bad rows in 360 samples (1.11%) of the training data; data.bad_rows = 0.01 allows 1.00%" in first["error"]
    assert first["steps"] == second["steps"] == 9
    assert first["saved"] == second["saved"] == ["step_9"]


def test_one_rank_passes_over_the_columns_for_all(one_rank: RankPool, two_ranks: RankPool, tmp_path: Path):
    lines = [f"{n % 2},{n},u{n % 7},{(n * 37) % 50}" for n in range(100)]
    (tmp_path / "a.csv").write_text("\n".join(["label,item,user,time", *lines]) + "\n")
    table = TableConfig({"item": TableFeature("sparse", num_rows=50)})
    data = DataConfig("table", str(tmp_path / "a.csv"), table=table, split="last", split_column="user")
    ((_, alone, _),) = one_rank.run(inputs.what_is_held_out, data)
    assert two_ranks.run(inputs.what_is_held_out, data) == [(1, alone, ""), (0, alone, "")]
    assert [number for number, is_held_out in enumerate(alone) if is_held_out] == list(range(93, 100))
    (tmp_path / "a.csv").write_text("\n".join(["label,item,user,time", *lines, "0,1"]) + "\n")
    first, second = two_ranks.run(inputs.what_is_held_out, data)
    assert first[2] == second[2] != ""
    assert "a.csv:102 has 2 comma-separated columns" in second[2]


def test_a_run_trains_on_the_others_and_evaluates_on_those_held_out(two_ranks: RankPool, tmp_path: Path):
    inputs.write_clicks(tmp_path / "day_0", bad=(3, 100, 101))
    run = inputs.config(tmp_path / "day_0", lookahead=4, bad_rows=0.1, split="random", chunk_rows=50)
    first, second = two_ranks.run(inputs.train, run, tmp_path / "saved")
    assert first["error"] == second["error"] == ""
    assert first["losses"] == second["losses"]
    samples = open_source(run.data).held_out.samples
    assert samples is not None
    held_out = samples.between(0, inputs.LINES).tolist()
    assert first["held_out"] == sum(held_out) - sum(held_out[row] for row in (3, 100, 101))
