"""The figures of the step matrix, from given times; and one tiny shape, run for real."""

from __future__ import annotations

import json

import pytest

from benchmarks import step_matrix


def test_ratios_are_taken_pair_by_pair_and_tails_from_the_median():
    found = step_matrix.figures({"resident": [1.0, 2.0, 1.0], "cached": [1.1, 2.2, 4.0], "look_ahead": [1.0, 1.0, 1.0]})
    assert found["resident_ms"] == 1000.0
    assert (found["cached_over_resident"], found["look_ahead_over_resident"]) == (1.1, 1.0)
    assert found["look_ahead_over_cached"] == 0.455  # of 0.909, 0.455 and 0.25
    assert found["cached_most_over_p50"] == pytest.approx(4.0 / 2.2, abs=1e-3)
    assert "resident_over_cached" not in found


def test_a_ratio_of_several_steps_has_the_work_of_every_fourth_one():
    seconds = {"resident": [1.0] * 9, "look_ahead": [1.0, 1.0, 1.0, 2.0] * 2 + [9.0]}
    assert step_matrix.figures(seconds)["look_ahead_over_resident"] == 1.0
    assert step_matrix.figures(seconds, steps_per_turn=4)["look_ahead_over_resident"] == 1.25


def test_the_summary_has_the_geometric_mean_and_the_worst_shape():
    shapes = [{"look_ahead_over_resident": 0.5}, {"look_ahead_over_resident": 2.0}]
    assert step_matrix.summary(shapes) == {"look_ahead_over_resident_mean": 1.0, "look_ahead_over_resident_worst": 2.0}


@pytest.mark.matrix
@pytest.mark.slow
def test_a_shape_runs_on_two_ranks(tmp_path, monkeypatch, capsys):
    arguments = (
        "--ranks 2 --batch-sizes 16 --dims 16 --dense none --scale 0.0001 --lookahead 4 --warmup-steps 1 --steps 4 "
        "--steps-per-turn 2"
    )
    monkeypatch.setattr(step_matrix, "_PROFILE_SAMPLES", 1000)
    monkeypatch.setattr("sys.argv", ["step_matrix", *arguments.split(), "--output", str(tmp_path / "found.json")])
    step_matrix.main()
    (shape,) = json.loads((tmp_path / "found.json").read_text())["shapes"]
    assert all(shape[f"{name}_ms"] > 0 for name in ("resident", "look_ahead"))
