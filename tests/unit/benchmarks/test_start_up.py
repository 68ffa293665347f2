"""Cases of the start-up benchmark: which run, and what one tells of itself."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from benchmarks import start_up


def test_rows_that_do_not_fit_are_made_lazily_only(monkeypatch):
    monkeypatch.setattr(start_up.psutil, "virtual_memory", lambda: SimpleNamespace(available=24e9))
    for mode in ("at_once", "torchrec"):
        found = start_up.measure(None, 340_000_000, mode)
        assert found == {"rows": 340_000_000, "mode": mode, "skipped": "the rows take 23.1 GB, 24.0 GB are free"}


@pytest.mark.matrix
@pytest.mark.slow
def test_a_start_is_measured_and_modes_train_alike(tmp_path, monkeypatch):
    output = tmp_path / "found.json"
    arguments = f"--rows 30000 --batch-size 16 --steps 3 --modes lazily at_once --output {output}"
    monkeypatch.setattr("sys.argv", ["start_up", *arguments.split()])
    start_up.main()
    lazily, at_once = json.loads(output.read_text())["cases"]
    assert lazily["loss"] == at_once["loss"]
    for case in (lazily, at_once):
        assert len(case["step_ms"]) == 3
        assert 0 < case["imports_seconds"] <= case["built_seconds"] <= case["first_step_seconds"]
        assert 0 < case["imports_peak_gb"] <= case["first_step_peak_gb"] <= case["last_step_peak_gb"]
