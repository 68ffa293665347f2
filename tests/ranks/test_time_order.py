"""Time order on several ranks: one stream, windows judged before they train, runs that go on; and the report of one."""

from __future__ import annotations

import itertools
import json
import signal
import time
from pathlib import Path

import pytest
import yambda
import yambda_like

from embershard.settings.decoding import to_toml
from tests.covering import matrix
from tests.ranks import commands, time_order
from tests.ranks.time_order import BORDER, INSIDE, Metrics, Trained
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks


def samples(ranks: list[Trained]) -> list[list[float]]:
    """The samples of each step, of all ranks."""
    return [list(itertools.chain(*parts)) for parts in zip(*(rank.samples for rank in ranks), strict=True)]


def assert_near(found: list[tuple[int, int, Metrics]], wanted: list[tuple[int, int, Metrics]]) -> None:
    assert [place[:2] for place in found] == [place[:2] for place in wanted]
    for (step, window, values), (_, _, near) in zip(found, wanted, strict=True):
        # In double precision; the AUC is of float32, in which two predictions may become equal.
        assert values == pytest.approx(near, rel=1e-5, abs=1e-5), f"window {window} at step {step}"


def test_windows_are_judged_before_they_train(one_rank: RankPool, tmp_path: Path) -> None:
    path = time_order.write_clicks(tmp_path / "clicks")
    (trained,) = one_rank.run(time_order.run, path, None, 5)
    (by_hand,) = one_rank.run(time_order.by_hand, path)
    assert len(by_hand) >= 6
    assert len({step for step, *_ in by_hand}) < len(by_hand), "two windows begin in one global batch"
    assert trained.late > 3
    assert_near(trained.windows, by_hand)
    with pytest.raises(AssertionError, match="window 1 at step"):
        assert_near(trained.windows, one_rank.run(_after_training, path)[0])


def _after_training(path: Path) -> list[tuple[int, int, Metrics]]:
    return time_order.by_hand(path, after_training=True)


@pytest.mark.parametrize("steps", [(INSIDE,), matrix((BORDER, INSIDE))], ids=len)
def test_one_stream_on_one_rank_and_two_and_runs_go_on(one_rank, two_ranks, tmp_path, steps) -> None:
    path = time_order.write_clicks(tmp_path / "clicks")
    whole = two_ranks.run(time_order.run, path, tmp_path / "two" / "checkpoints", 5)
    alone = one_rank.run(time_order.run, path, None, 0)
    assert samples(whole) == samples(alone)
    seen = list(itertools.chain(*samples(whole)))
    assert len(seen) == len(set(seen)) == 600
    assert whole[0].windows == whole[1].windows
    assert_near(whole[0].windows, alone[0].windows)
    for step in steps:
        saved = tmp_path / "two" / "checkpoints" / f"step_{step}"
        left = [place for place in whole[0].windows if place[0] >= step]
        assert 0 < len(left) < len(whole[0].windows)
        assert (step in {at for at, *_ in left}) == (step == BORDER)
        rest = two_ranks.run(time_order.run, path, None, 5, saved)
        assert rest[0].windows == left, "bit for bit"
        assert samples(rest) == samples(whole)[step:]
        (other,) = one_rank.run(time_order.run, path, None, 0, saved)
        assert other.samples == samples(whole)[step:]
        assert_near(other.windows, left)


def embershard(folder: Path, *arguments: str) -> str:
    done = commands.run(arguments, folder)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.matrix
def test_a_run_that_goes_on_reports_all_its_windows(tmp_path: Path) -> None:
    path = time_order.write_clicks(tmp_path / "clicks")
    (tmp_path / "run.toml").write_text(to_toml(time_order.make_config(path, 5)))
    train = ("train", "--config", str(tmp_path / "run.toml"), "--nproc", "2")
    run_dirs = {name: ("--run-dir", str(tmp_path / name)) for name in ("whole", "parts")}
    embershard(tmp_path, *train, *run_dirs["whole"])
    at_17 = ("--set", "train.max_steps=17", "--set", "checkpoint.at_end=true")
    embershard(tmp_path, *train, *run_dirs["parts"], *at_17)
    said = embershard(tmp_path, *train, *run_dirs["parts"], "--resume", "--set", "train.max_steps=none")
    assert "Continuing from" in said
    whole, parts = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "parts"))
    assert parts["windows"] == whole["windows"], "bit for bit, each once"
    aucs = [window["quality"]["auc"] for window in whole["windows"]]
    counts = [window["samples"] for window in whole["windows"]]
    assert whole["auc"] == pytest.approx(sum(a * n for a, n in zip(aucs, counts, strict=True)) / sum(counts))
    assert whole["held_out"]["samples"] == whole["eval_samples"] == sum(counts)
    shown = embershard(tmp_path, "report", str(tmp_path / "parts"))
    for window, auc in zip(whole["windows"], aucs, strict=True):
        (line,) = [line for line in shown.splitlines() if line.strip().startswith(window["start"])]
        assert f"{auc:.4f}" in line
    embershard(tmp_path, "report", str(tmp_path / "parts"), "-o", str(tmp_path / "report.html"))
    page = (tmp_path / "report.html").read_text()
    assert "AUC by window" in page
    assert "calibration by window" in page


@pytest.mark.matrix
def test_days_of_music_killed_and_resumed_are_those_of_a_whole_run(tmp_path: Path) -> None:
    """HSTU, caches with evictions, two ranks: killed before the end of a day whose next one is then evaluated."""
    log, made = str(tmp_path / "log"), str(tmp_path / "samples")
    assert yambda_like.main(["--scale", "0.0001", "--events", "30", "--days", "4", "-o", log]) == 0
    sizes = ["--history", "12", "--cross-scale", "0.0001"]
    assert yambda.main([f"{log}/multi_event.parquet", *sizes, "-o", made]) == 0
    train = ("train", "--config", f"{made}/run.toml", "--nproc", "2", "--set", "train.device=cpu", "--set")
    train = (*train, "train.batch_size=16", "--set", "cache.ratio=0.6", "--set", "checkpoint.every_steps=20")
    run_dirs = {name: tmp_path / name for name in ("whole", "parts")}
    embershard(tmp_path, *train, "--run-dir", str(run_dirs["whole"]))
    part = commands.start([*train, "--run-dir", str(run_dirs["parts"])], tmp_path / "killed.txt")
    try:
        for _ in range(6000):
            if (run_dirs["parts"] / "checkpoints" / "step_20").exists() or part.poll() is not None:
                break
            time.sleep(0.02)
    finally:
        part.kill()
    assert part.wait(60) == -signal.SIGKILL
    last = max(int(path.name.partition("_")[2]) for path in (run_dirs["parts"] / "checkpoints").glob("step_*"))
    said = embershard(tmp_path, *train, "--run-dir", str(run_dirs["parts"]), "--resume")
    assert f"step_{last}" in said
    whole, parts = (json.loads((folder / "result.json").read_text()) for folder in run_dirs.values())
    assert [each["step"] > last for each in whole["windows"]].count(True) >= 1, "a day's end lies behind the kill"
    assert parts["windows"] == whole["windows"], "bit for bit, each once"
    assert (parts["loss"], parts["steps"]) == (whole["loss"], whole["steps"])
    assert whole["cache"]["evictions"] > 0
