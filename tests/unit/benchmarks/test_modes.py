"""The comparison of modes: its settings are those of runs, and its table says where a mode loses."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from benchmarks import mode_runs, modes
from embershard.settings.files import load_config
from embershard.training.config import RunConfig

OPTIONS = argparse.Namespace(
    data=list(modes.DATA), samples=1000, global_batch_size=64, path="clicks.txt", lookahead=4, ratio=0.05
)
RESULT = {
    "measured_steps": 10,
    "samples_per_second": 100.0,
    "cpu_seconds": 2.0,
    "world_size": 2,
    "sent_bytes": {"ids": 200, "embeddings": 400, "gradients": 600, "dense_all_reduce": 100, "other": 9999},
    "cache": {"fills": 50, "critical_path_fills": 20},
    "auc": 0.75,
}


@pytest.mark.parametrize("mode", modes.modes(1))
@pytest.mark.parametrize("data", [*modes.DATA, "real"])
def test_every_mode_is_settings_of_a_run(tmp_path, data, mode):
    config = tmp_path / "run.toml"
    config.write_text(modes._MODEL)
    settings = {**modes.sources(OPTIONS)[data], "cache.ratio": OPTIONS.ratio, **modes.modes(1000)[mode]}
    sets = modes._sets(settings)
    found = load_config(RunConfig, config, [value for value in sets if value != "--set"])
    assert found.data.kind == ("criteo" if data == "real" else "synthetic")
    assert found.cache.enabled == (mode != "resident")
    assert (found.cache.policy == "static") == (mode == "static")


def test_figures_are_medians_of_rounds_and_bytes_of_training():
    found = modes.figures([RESULT, {**RESULT, "samples_per_second": 300.0, "auc": 0.76}, RESULT])
    assert found["samples_per_second"] == 100
    assert found["cpu_ms_per_step"] == 200.0
    assert (found["sent_in_training"], found["fills_per_step"], found["critical_path_fills_per_step"]) == (65, 5, 2)
    assert (found["auc"], found["auc_spread"]) == ([0.75, 0.76, 0.75], 0.01)
    assert modes.figures([{**RESULT, "cache": None}])["fills_per_step"] == 0


def test_a_run_that_fails_is_a_line_of_the_table():
    """And no part of what the others are compared with; one that failed in one round only has the figures of others."""
    common = {"data": "real", "ranks": 2}
    runs = {"pooled": [RESULT, "failed: no memory"], "rows": ["failed: a rank has ended; no memory", "not run"]}
    rows = modes.compared([{**common, "mode": mode, **modes.figures(found)} for mode, found in runs.items()])
    assert rows[0]["samples_per_second"] == 100
    assert [row["problems"] for row in rows] == [
        ["failed: no memory"],
        ["failed: a rank has ended; no memory", "not run"],
    ]
    text = modes.table(rows).splitlines()
    assert text[2].endswith("| none |")
    assert text[3] == "| real | 2 | rows |  |  |  |  |  | failed: a rank has ended; no memory |"


class FakeServers:
    """Fails where the mode is "rows"."""

    def __init__(self, num_ranks, log):
        pass

    def run(self, job, timeout_seconds):
        if "_rows_" in job.run_dir:
            raise mode_runs.RunFailedError("a rank has ended; no memory")
        return RESULT

    def close(self):
        pass


def test_a_failing_mode_and_the_end_of_the_time_stop_nothing(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(modes, "RankServers", FakeServers)
    monkeypatch.setattr(modes.cli, "main", lambda arguments: said.append(arguments[0]) or 0)
    options = {**vars(OPTIONS), "data": ["correlated"], "path": None, "ranks": [1, 2], "modes": ["rows", "resident"]}
    options |= {"minutes": 1.0, "hot_bytes": 1000, "run_seconds": 9.0}
    rounds = modes.Rounds(argparse.Namespace(**options), tmp_path)
    rounds.run(0)
    assert [(row["mode"], "samples_per_second" in row) for row in rounds.rows()] == 2 * [
        ("rows", False),
        ("resident", True),
    ]
    assert said.count("plan") == 2
    rounds = modes.Rounds(argparse.Namespace(**{**options, "minutes": -1.0}), tmp_path)
    rounds.run(1)
    assert {row["problems"][0] for row in rounds.rows()} == {"not run: the time was up"}


@pytest.mark.slow
def test_ranks_that_fail_say_why_and_are_started_again(tmp_path, monkeypatch):
    program = "import sys; print('ready', flush=True); sys.stdin.readline(); sys.exit('no such mode')"
    start = subprocess.Popen
    monkeypatch.setattr(
        mode_runs.subprocess, "Popen", lambda command, **rest: start([sys.executable, "-c", program], **rest)
    )
    servers = mode_runs.RankServers(2, tmp_path / "log")
    for _ in range(2):
        with pytest.raises(mode_runs.RunFailedError, match="a rank has ended; no such mode"):
            servers.run(mode_runs.Job("run.toml", [], str(tmp_path)), 60.0)
    program = "import time; print('ready', flush=True); time.sleep(600)"
    with pytest.raises(mode_runs.RunFailedError, match="the time was up; nothing was written"):
        servers.run(mode_runs.Job("run.toml", [], str(tmp_path)), 0.1)


def test_the_table_says_where_a_mode_loses():
    common = {"data": "real", "ranks": 2}
    quick, small = {**RESULT, "samples_per_second": 9}, {**RESULT, "samples_per_second": 5}
    small["sent_bytes"] = {**RESULT["sent_bytes"], "embeddings": 100}
    results = {"pooled": quick, "rows": small}
    rows = [{**common, "mode": mode, **modes.figures([result])} for mode, result in results.items()]
    text = modes.table(modes.compared(rows)).splitlines()
    assert text[2].endswith("| bytes: rows |")
    assert text[3].endswith("| speed: pooled |")
    assert modes.table(modes.compared(rows[:1])).endswith("| none |")
