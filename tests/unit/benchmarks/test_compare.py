"""`python -m benchmarks`: figures beside the stored ones of this kind of machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks.compare import comparison_lines, stored_results, verdict


def result(step_ms: float, cpu: str = "Xeon", rounds: int = 3) -> dict[str, Any]:
    machine = {"cpu": cpu, "cores": 2, "gpu": None, "python": "3.11"}
    cases = [{"step_ms": step_ms, "samples_per_second": 100 / step_ms, "name": "x", "is_steady": True}]
    return {"benchmark": "steps", "settings": {"rounds": rounds}, "cases": cases, "machine": machine}


def test_ratio_and_verdict_on_the_same_kind_of_machine():
    lines = list(comparison_lines(result(30.0), [result(1.0, cpu="EPYC"), result(20.0)]))
    assert lines == [
        "cases.0.step_ms  30, stored 20: 1.50x, slower",
        "cases.0.samples_per_second  3.33333, stored 5: 0.67x, slower",
    ]


def test_more_is_better_for_speeds_and_less_for_times():
    ratios = {"step_ms": 1.5, "samples_per_second": 1.5, "start_seconds": 0.5, "fills": 2.0}
    said = ["slower", "faster", "faster", "other"]
    assert [verdict(name, ratio) for name, ratio in ratios.items()] == said
    assert verdict("step_ms", 1.1) == "as stored"


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ([], "Nothing is stored for this kind of machine (Xeon, 2 cores)."),
        ([result(1.0, cpu="EPYC")], "Nothing is stored for this kind of machine (Xeon, 2 cores); only for EPYC"),
        ([result(1.0, rounds=9)], "was measured with other settings, so figures are not compared"),
    ],
)
def test_figures_that_cannot_be_compared_stand_alone(stored, said):
    first, *figures = comparison_lines(result(30.0), stored)
    assert said in first
    assert figures[0] == "cases.0.step_ms  30"


@pytest.mark.slow
def test_all_stored_results_can_be_read(project_dir: Path):
    folder = project_dir / "benchmarks" / "results"
    for path in (project_dir / "benchmarks").glob("*.py"):
        for found in stored_results(folder, path.stem):
            list(comparison_lines(found, [found]))


def test_the_list_names_every_benchmark(capsys):
    assert command.main([]) == 0
    text = capsys.readouterr().out
    for name in ("command_start", "step_overhead", "start_up"):
        assert name in text
    for name in ("common", "mode_runs", "step_server"):
        assert name not in text, "it serves other benchmarks"


def test_an_unknown_benchmark_and_a_failed_one(capsys, monkeypatch):
    with pytest.raises(SystemExit) as stopped:
        command.main(["step_overhaed"])
    assert stopped.value.code == 2
    assert "there is no benchmark 'step_overhaed'; there are " in capsys.readouterr().err
    monkeypatch.setattr(command.sys, "executable", "/bin/false")
    assert command.main(["command_start"]) == 1
    assert "command_start failed (exit code 1)." in capsys.readouterr().out


def test_a_benchmark_runs_and_is_compared(capsys, monkeypatch, tmp_path):
    (tmp_path / "python").write_text(
        "#!/bin/sh\nwhile [ $# -gt 1 ]; do shift; done\necho '" + json.dumps(result(2.0)) + "' > $1\n"
    )
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(command.sys, "executable", str(tmp_path / "python"))
    assert command.main(["command_start", "--", "--rounds", "1"]) == 0
    text = capsys.readouterr().out
    assert "benchmarks.command_start --rounds 1" in text
    assert "cases.0.step_ms  2" in text
