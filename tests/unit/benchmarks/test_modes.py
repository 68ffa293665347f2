"""The comparison of modes: its settings are those of runs, and its table says where a mode loses."""

from __future__ import annotations

import argparse

import pytest

from benchmarks import modes
from embershard.launch.config import load_config
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
