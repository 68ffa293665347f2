"""How a run was started, and the summary of its model: what the folder keeps, and what the page and the screen show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from embershard.models import ModelTable
from embershard.reports.run_folder import RunFolder
from embershard.reports.start import STARTS, EmbeddingTable, Layer, ModelSummary, Start

TABLES = (
    ModelTable("users", 1000, 16, "fp32", ("user",), "bags", "sum"),
    ModelTable("items", 4000, 8, "fp16", ("item",), "bags", "sum"),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleDict({"users": nn.Embedding(1000, 16)})
        self.over = nn.Sequential(nn.Linear(24, 4), nn.ReLU(), nn.Linear(4, 1, bias=False, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones(()))


def test_a_summary_has_tables_and_layers_and_no_table_twice() -> None:
    summary = ModelSummary.of(Model(), TABLES, ["bags"])
    assert summary.tables == (EmbeddingTable("users", 1000, 16, 64_000), EmbeddingTable("items", 4000, 8, 64_000))
    assert set(summary.layers) == {
        Layer("", "Model", "1", 1, 4),
        Layer("over.0", "Linear", "4 x 24, 4", 100, 400),
        Layer("over.2", "Linear", "1 x 4", 4, 32),
    }
    tables, layers = summary.lines
    assert tables == (
        "Tables: 5,000 rows, 125.00 KiB of weights. The largest: users 1,000 x 16 (62.50 KiB), items 4,000 x 8 "
        "(62.50 KiB)."
    )
    assert layers == "Dense layers: 105 parameters, 436 B: its own 1, over 104."


def test_a_folder_keeps_every_start(tmp_path: Path) -> None:
    summary = ModelSummary.of(Model(), TABLES, ["bags"])
    assert RunFolder(tmp_path, None).starts == []
    Start.now(0, "embershard train --config a.toml", "2 x CPU", summary).add_to(tmp_path)
    with (tmp_path / STARTS).open("a") as file:
        file.write('{"time": "2026\n')  # a process that was killed
    Start.now(30, "embershard train --config a.toml --resume", "1 x CPU", summary).add_to(tmp_path)
    found = RunFolder(tmp_path, None)
    assert [(each.step, each.device) for each in found.starts] == [(0, "2 x CPU"), (30, "1 x CPU")]
    assert found.starts[1].model == summary
    assert found.starts[0].versions["torch"] == torch.__version__
    assert found.first_time == found.starts[0].time


def test_the_page_has_command_host_versions_and_the_model(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="Plotly is not installed (the extra [report])")
    from embershard.extras.report_page.runs import Run, begun, models

    summary = ModelSummary.of(Model(), TABLES, ["bags"])
    for name, steps in (("a", (0, 30)), ("b", (0,))):
        (tmp_path / name).mkdir()
        for step in steps:
            Start.now(step, f"embershard train --run-dir {name}", "2 x CPU", summary).add_to(tmp_path / name)
    runs = [Run(name, number, RunFolder(tmp_path / name, None)) for number, name in enumerate("ab")]
    rows = {row[0]: row[1:] for row in begun(runs).parts[0].rows}
    assert rows["command"] == ("embershard train --run-dir a", "embershard train --run-dir b")
    assert rows["resumed at step"] == ("30", "")
    assert rows["torch"] == (torch.__version__,) * 2
    assert {"started", "host", "devices", "embershard", "python"} <= rows.keys()
    section = models(runs)
    assert section.text == summary.lines, "once: both train the same"
    tables, layers = section.parts
    assert ("users", "1,000 x 16", "62.50 KiB") in tables.rows
    assert ("over.0", "Linear", "4 x 24, 4", "100", "400 B") in layers.rows


def test_runs_of_earlier_versions_have_what_their_result_says() -> None:
    pytest.importorskip("plotly", reason="Plotly is not installed (the extra [report])")
    from embershard.extras.report_page.runs import Run, begun, models
    from embershard.run_result import RunResult
    from tests.unit.planning.runs import predicted_plan, result_of

    result = RunResult.of(result_of(predicted_plan(), versions={"torch": "2.11"}, git_commit="0123456789abcdef"))
    runs = [Run("old", 0, RunFolder(Path("nowhere"), result))]
    assert begun(runs).parts[0].rows == [("commit", "0123456789ab"), ("torch", "2.11")]
    assert not models(runs).parts
