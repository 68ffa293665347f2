"""The benchmark of publications, at toy size."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import publish

pytestmark = pytest.mark.extra


@pytest.mark.slow
@pytest.mark.matrix
def test_delays_of_all_deltas_are_measured(tmp_path: Path):
    options = argparse.Namespace(rows=20_000, dim=4, batch_size=64, ratio=0.3, steps=60, every=4, delay_steps=12)
    found = publish.run(options, tmp_path)
    assert len(found["rows"]) == 15
    assert len(found["delay"]["lock_ms"]) == 3
    assert found["delay"]["oldest"]["most"] >= found["delay"]["newest"]["most"] > 0
    assert found["bytes"]["beyond_keys"] >= 1
