"""A row of `METRICS` is all that a figure needs, or a function of one's own: they are found wherever figures are."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from rich.console import Console

from embershard.commands.cli import main
from embershard.commands.train.run import train_run
from embershard.distributed import Supervision, process_group
from embershard.metrics.config import MetricsConfig
from embershard.metrics.figures import METRICS, Metric, OfSums, more_is_better
from embershard.reports.results import results_text
from embershard.reports.sweep_tables import spread_tables
from embershard.reports.tracking import trackers
from embershard.run_result import RunResult
from embershard.sweeps.outcomes import Outcome
from embershard.sweeps.spread import Configuration
from embershard.training.config import TrackingConfig
from tests.ranks.time_order import make_config, write_clicks

Floats = NDArray[np.float64]

BRIER = Metric(
    title="Brier score",
    form=".3f",
    meaning="mean squared distance of probabilities from labels",
    of={"binary": OfSums(lambda p, y, w: (w * (p - y) ** 2, w), lambda total, count: total / count)},
    more_is_better=False,
    places=("slices", "closing", "sweeps", "page", "windows"),
)


class Noting:
    """A tracker that keeps the names of what it gets."""

    names: ClassVar[set[str]] = set()

    def __init__(self, run: object) -> None: ...

    def add(self, step: int, numbers: Any) -> None:
        self.names |= set(numbers)

    def finish(self, result: Any) -> None:
        self.names |= set(result)

    def close(self) -> None: ...


def nearness(scores: Floats, labels: Floats, weights: Floats) -> Floats:
    """A figure of one's own, of each sample."""
    return 1 - (scores - labels) ** 2


def share_of_clicks(scores: Floats, labels: Floats, weights: Floats) -> float:
    """A figure of one's own, of all samples."""
    return float(labels.mean())


OWN = f"{__name__}:nearness"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "title"), [("brier", "Brier score"), (OWN, "nearness")])
def test_a_row_is_found_wherever_figures_are(name, title, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(METRICS, "brier", BRIER)
    monkeypatch.setitem(trackers._KINDS, "tensorboard", (Noting, "torch", ""))
    clicks = write_clicks(tmp_path / "clicks")
    config = make_config(clicks, 0)
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, eval_path=str(clicks / "part_2.parquet")),
        metrics=MetricsConfig(("auc", name), slices=("user",), most_slices=2),
        train=dataclasses.replace(config.train, max_steps=12, metric=name, early_stopping=9, eval_every=6),
        tracking=TrackingConfig(trackers=("tensorboard",)),
    )
    run = tmp_path / "run"
    with process_group("cpu") as ranks:
        train_run(
            config, ranks, run, resume=None, unverified=False, changes=(), same_run="", go_on="",
            supervision=Supervision(),
        )  # fmt: skip
    said = capsys.readouterr().out
    assert title in said.partition("training finished")[0], "the lines of evaluations and windows"
    assert title in said.partition("training finished")[2], "the closing table"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in lines if name in line} == {"eval", "window"}
    assert all(name in of for line in lines if "slices" in line for of in line["slices"]["user"].values())
    own = {f"{at}{name.replace('.', '%2E')}" for at in ("eval/", "window/", "result/", "result/slices.user.(others).")}
    assert own <= Noting.names
    result = RunResult.read(run)
    distance = result.quality[name] or 0
    assert 0 < (distance if name == "brier" else 1 - distance) < 0.5
    assert result.best.metric == name

    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.count(title) >= 3, "closing table, slices, windows"
    assert title in results_text([run], "markdown")
    from embershard.extras.report_page.write import write_page

    write_page([run], tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().count(title) >= 4, "results, slices, windows, closing table"
    outcome = Outcome("run", "0", 0, 1, {}, "finished", "", 1.0, "", 1)
    configuration = Configuration({}, (), (outcome,), (run,), (result,))
    screen = io.StringIO()
    for table in spread_tables([configuration], 200):
        Console(file=screen, width=200).print(table)
    assert title.partition(" ")[0] in screen.getvalue()
    assert more_is_better(f"{name}/click") is (name == OWN)


def test_a_row_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(METRICS, "brier", BRIER)
    chance = np.random.default_rng(0)
    labels = (chance.random(400) < 0.4).astype(float)
    for name, scores in (("a", np.full(400, 0.5)), ("b", 0.4 + 0.2 * labels)):
        columns = {"logit": np.log(scores / (1 - scores)), "score": scores, "label": labels}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    files = [str(tmp_path / f"{name}.parquet") for name in "ab"]
    names = f"brier,{OWN}"
    assert main(["compare", *files, "--json", "--replicates", "50", "--metrics", names]) == 0
    found = {each["metric"]: each for each in json.loads(capsys.readouterr().out)["labels"][""]}
    assert found["brier"]["a"] == pytest.approx(0.25)
    assert found["brier"]["b"] == pytest.approx(0.16)
    assert found["brier"]["better"] == "B"
    assert found[OWN]["better"] == "B"
    own, row = found[OWN], found["brier"]
    assert (1 - own["low"], 1 - own["high"]) == pytest.approx((1 + row["high"], 1 + row["low"])), "the same draws"
    assert main(["compare", *files, "--metrics", f"{__name__}:share_of_clicks"]) == 2
    assert "returned a number of all samples; needed one of each, [400]" in capsys.readouterr().err
