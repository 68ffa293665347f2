"""Published speeds of HSTU's training stand beside what a plan's costs say, and no cost knows them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import hstu_steps
from benchmarks.hstu_steps import HEAD, STEPS, step_seconds, table_row

ROOT = Path(__file__).resolve().parents[3]
SHOWN = json.loads((ROOT / "benchmarks" / "results" / "simulator_public.json").read_text())["hstu_steps"]
pytestmark = pytest.mark.extra


def test_the_steps_are_shown_with_what_was_published() -> None:
    assert [case["published_tflops"] for case in SHOWN["cases"]] == [step.tflops for step in STEPS]
    assert [case["speed"] for case in SHOWN["cases"]] == [1.0, 1.53, 4.0, 3.93, 4.08, 4.11]
    page = (ROOT / "docs" / "planning.md").read_text()
    for line in (HEAD, *map(table_row, SHOWN["cases"])):
        assert line in page
        assert line.count("|") == HEAD.count("|")
    for case, step in zip(SHOWN["cases"], STEPS, strict=True):
        assert ("ours_ms" in case, "not compared" in case["ours"]) == (step.cached is not None,) * 2


@pytest.mark.slow
def test_what_dealt_steps_take_is_told_by_lengths_alone(monkeypatch) -> None:
    told = [step_seconds(replace(STEPS[number], tflops=tflops)) for number in (0, 1) for tflops in (1.0, 900.0)]
    assert told[0] == told[1] > told[2] == told[3]
    assert round(told[0] * 1e3, 1) == pytest.approx(SHOWN["cases"][0]["ours_ms"], rel=0.02)
    monkeypatch.setattr(hstu_steps, "_length_shares", lambda: [0.0] * 499 + [1.0] + [0.0] * 3596)
    for each in (hstu_steps._drawn, hstu_steps._data):
        each.cache_clear()
    try:
        assert step_seconds(STEPS[0]) == pytest.approx(step_seconds(STEPS[1])), "all lengths are equal"
    finally:
        for each in (hstu_steps._drawn, hstu_steps._data):
            each.cache_clear()
