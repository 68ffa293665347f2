"""The cost of a plan: one tiny size, run for real."""

from __future__ import annotations

import json

import pytest

from benchmarks import plan_cost


@pytest.mark.slow
def test_a_size_is_counted_and_timed(tmp_path, monkeypatch):
    arguments = "--batch-sizes 16 --scale 0.001 --lookahead 4 --warmup-samples 320 --steps 5"
    monkeypatch.setattr("sys.argv", ["plan_cost", *arguments.split(), "--output", str(tmp_path / "found.json")])
    plan_cost.main()
    (size,) = json.loads((tmp_path / "found.json").read_text())["sizes"]
    assert size["lookups"] == 16 * 26
    assert 0 < size["fills"] <= size["unique_ids"] <= size["lookups"]
    assert size["all_ms"] >= max(size["know_ms"], size["prepare_ms"]) > 0
