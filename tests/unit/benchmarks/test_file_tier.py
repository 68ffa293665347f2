"""The benchmark's machinery, on a stream that takes no time."""

from __future__ import annotations

import argparse
import subprocess
from typing import Any

import pytest

from benchmarks import file_tier
from benchmarks.file_tier import limited_run, limits, measure, zipf
from tests.limited_memory import MemoryGroup, NoMemoryGroupError

pytestmark = pytest.mark.slow


@pytest.mark.matrix
def test_a_point_holds_together() -> None:
    point = measure(zipf(0.7, 300, num_rows=4000, batch_size=4, bag=4), host_share=0.2)
    assert 4 <= len(point.windows) <= len(file_tier.WINDOWS)  # the longest are no longer than the stream
    assert set(point.over_optimum) == {*point.windows, "lru"}
    assert abs(point.windows[str(point.target_lookahead)] - 6) < 0.5
    by_window = [point.over_optimum[lookahead] for lookahead in sorted(point.windows, key=int)]
    assert by_window[0] > by_window[-1] >= 1
    assert all(traffic["rows_drawn"] == point.distinct_rows for traffic in point.traffic.values())
    assert point.holds_over_optimum is not None
    assert point.rule_over_optimum is not None
    assert point.counts_over_optimum is not None
    assert 1 <= point.holds_over_optimum <= min(point.rule_over_optimum, point.counts_over_optimum)
    assert point.reached == (point.over_optimum[str(point.target_lookahead)] <= 1.3)


def test_kinds_are_trained_in_turn_and_the_control_under_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run(_: argparse.Namespace, host: str, is_limited: bool) -> dict[str, Any]:
        calls.append((host, is_limited))
        return {"exit_code": 0, "median_step_seconds": float(len(calls)), "peak_bytes": len(calls)}

    monkeypatch.setattr(file_tier, "limited_run", run)
    found = limits(argparse.Namespace(rounds=2))
    kinds = [("file", True), ("mmap", True), ("memory", False)]
    assert calls == [*kinds, *kinds[::-1], ("memory", True)]
    assert found["medians"]["mmap"] == {"median_step_seconds": 3.5, "peak_bytes": 3.5}


def test_a_run_that_was_ended_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    options = argparse.Namespace(
        dim=4, limit_bytes=64 << 20, host_bytes=0, batch_size=1, steps=1, locality=1.0, folder="."
    )
    ended = subprocess.CompletedProcess([], -9, "", "Killed")
    monkeypatch.setattr(MemoryGroup, "run", lambda *_, **__: ended)
    try:
        found = limited_run(options, "memory", is_limited=True)
    except NoMemoryGroupError as error:
        pytest.skip(str(error))
    assert (found["exit_code"], found["error"]) == (-9, "Killed")
