"""Messages about what runs gave beside their plans, and about models that are compared."""

from __future__ import annotations

import io
import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embershard.commands import cli
from embershard.launch import launcher
from embershard.sweeps.outcomes import Outcome, keep_outcome
from tests.unit.commands.conftest import start_here
from tests.unit.commands.remedies.table import FILES, LEFT_OUT, Remedy, cases, check


def _scores(num_samples: int = 60, **changed: Any) -> bytes:
    """Scores of samples with their labels, as `embershard predict` writes them."""
    numbers = np.random.default_rng(num_samples).normal(size=num_samples)
    columns = {
        "user": np.arange(num_samples) % 7,
        "logit": numbers,
        "score": 1 / (1 + np.exp(-numbers)),
        "label": np.arange(num_samples) % 2 * 1.0,
        **changed,
    }
    file = io.BytesIO()
    pq.write_table(pa.table({name: values for name, values in columns.items() if values is not None}), file)
    return file.getvalue()


FILES |= {
    "user.toml": "[tables.t_user_id]\n",
    "zero.toml": '[zero]\nsource = "none"\ndevice = "cpu"\nranks_per_node = 1\nhost_memory_bytes = 9\nrates.1 = {}\n',
    "a.parquet": _scores(),
    "b.parquet": _scores(60, logit=np.arange(60.0), score=np.arange(60) / 60),
    "fewer.parquet": _scores(59),
    "no_labels.parquet": _scores(label=None),
    "no_users.parquet": _scores(user=None),
    "weighted.parquet": _scores(weight=np.arange(60.0)),
    "below.parquet": _scores(weight=np.arange(60.0) - 1),
    "texts.parquet": _scores(weight=["much"] * 60),
}
_SETTINGS = "--set train.batch_size=2 --set look_ahead.lookahead=2"
_PLAN = f"plan city.toml --tables user.toml --ranks 1 {_SETTINGS}"
_TRAIN = f"train city.toml --nproc 1 {_SETTINGS} --set cache.ratio=0.5"
_CORRECT = "--recalibrate out.toml"

#: Runs in the folder: "long" and "short" with plan.json, "free" without; a sweep with runs of two configurations.
OF_REPORTS = [
    Remedy(("report",), "", "plan.json", r"there is a page, (-o) FILE\.html", "-o out.html"),
    Remedy(("report",), "", f"short {_CORRECT}", "Recalibrate with a (longer run)", f"long {_CORRECT}", True),
    Remedy(("report",), "", "free --predicted", r"Train with one \(embershard (train --plan) FILE\)", "new --predicted",
        True, first=_TRAIN.replace("train", "{}", 1).replace("city.toml", "plan.json city.toml --run-dir new")),
    Remedy(("report",), "", "free --predicted", r"compare with \((--plan) FILE\)", "--plan plan.json"),
    Remedy(("report",), "", f"free {_CORRECT}", r"Train with one \(embershard (train --plan) FILE\)\.$",
        f"long {_CORRECT}", True),
    Remedy(("report",), "", f"free {_CORRECT} --plan plan.json", "(Recalibrate with a run and its own plan)",
        f"long {_CORRECT}", True),
    Remedy((f"report long {_CORRECT}",), "", "--plan rows.json", "with a run and (its own plan)", LEFT_OUT, True),
    Remedy((f"report long {_CORRECT}",), "", "--plan batch.json", "a run (as it was planned)", LEFT_OUT, True),
    Remedy((f"report long {_CORRECT}",), "", "--topology h200x8", "(a topology of one kind of device)",
        "--topology cpu", True),
    Remedy((f"report long {_CORRECT}",), "", "--topology zero.toml", "Use another (--topology)",
        "--topology cpu", True),
    Remedy((f"report long {_CORRECT} --plan nowhere_made.json",), "", "", r"Name it: (--topology) NAME",
        "--topology cpu"),
    Remedy((f"report long {_CORRECT} --plan made_for_mine.json",), "", "", r"Give its file: (--topology) FILE",
        "--topology mine.toml", first="report long --topology cpu --recalibrate mine.toml"),
    Remedy(("report long --predicted",), "", "--plan edited.json", r"Compare with another one \((--plan) FILE\)",
        "--plan plan.json", True),
    Remedy(("report long --predicted",), "", "--plan edited.json", "(embershard plan) writes plans with predictions",
        "--plan new.json", True, first=f"{_PLAN} -o new.json"),
    Remedy(("report long --predicted",), "", "--plan two.json", "Give a plan (for as many)", LEFT_OUT, True),
    Remedy(("report long --predicted",), "", "--plan old.json", "(Plan again)", "--plan new.json", True,
        first=f"{_PLAN} -o new.json"),
    Remedy(("report",), "", "sweep", r"which needs (-o) FILE\.html", "-o out.html"),
    Remedy(("report",), "", "sweep", "or (--format)", "--format csv"),
    Remedy(("report",), "", "sweep", "or (give a run)", "long", True),
    Remedy(("report",), "", "going", r"there is the page \(embershard report RUN (-o) FILE\.html\)",
        "going -o out.html", True),
]  # fmt: skip
OF_COMPARISONS = [
    Remedy(("compare a.parquet",), "", "weighted.parquet", "or (--no-weight)"),
    Remedy(("compare a.parquet",), "", "weighted.parquet", "(--weight) COLUMN", "b.parquet --weight user", True),
    Remedy(("compare a.parquet",), "", "no_labels.parquet", "needed (scores of samples with labels)",
        "b.parquet", True),
    Remedy(("compare a.parquet",), "", "fewer.parquet", "Score both on the (same file)", "b.parquet", True),
    Remedy(("compare",), "", "long scores.parquet", r"Score both .* \(embershard (predict) RUN --data FILE -o SCORES\)",
        "new.parquet scores.parquet", True, first="{} long --data city.csv -o new.parquet"),
    Remedy(("compare b.parquet",), "", "no_users.parquet --group user", "Keep it .* (--keep user)",
        "a.parquet --group user", True),
    Remedy(("compare scores.parquet",), "", "scores.parquet --group user_id",
        r"Keep it when you score: embershard predict .*(--keep user_id)", "--help", True),
    Remedy(("compare",), "", "below.parquet below.parquet", "needed (a weight of at least 0)", "--no-weight"),
    Remedy(("compare",), "", "texts.parquet texts.parquet", "(needed numbers)", "--no-weight"),
    Remedy(("compare a.parquet",), "", "city.csv", "not a (Parquet) file", "b.parquet", True),
    Remedy(("compare a.parquet",), "", "sweep/states", "folder of neither (a run) nor", "b.parquet", True),
    Remedy(("compare long",), "", "sweep", r"of its settings as do: (sweep:\S+)", instead=True),
    Remedy(("compare",), "", "sweep:cache.ratio=0.3 sweep:cache.ratio=0.5", "or (name one run of each)",
        "sweep/runs/0 sweep/runs/2", True),
]  # fmt: skip


@cache
def _made(folder: Path) -> Path:
    """Plan, train, and score."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(launcher, "start_ranks", start_here)
        for name in ("city.toml", "city.csv", "user.toml"):
            Path(name).write_text(str(FILES[name]))
        for words in (
            f"{_PLAN} -o plan.json",
            f"{_PLAN} -o rows.json --types row_wise",
            f"{_PLAN} -o batch.json --set train.batch_size=4",
            f"{_PLAN} -o two.json --ranks 2",
            f"{_TRAIN} --plan plan.json --set train.max_steps=20 --run-dir long",
            f"{_TRAIN} --plan plan.json --set train.max_steps=1 --run-dir short",
            f"{_TRAIN} --set train.max_steps=1 --run-dir free",
            "predict long --data city.csv -o scores.parquet",
        ):
            assert cli.main(words.split()) == 0
        shutil.copytree("short", "going")
        Path("going/result.json").unlink()
        plan = Path("plan.json").read_text()
        Path("edited.json").write_text(re.sub(r'"slots": \d+', '"slots": 9', plan))
        Path("nowhere_made.json").write_text(plan.replace('"topology": "cpu",', ""))
        Path("made_for_mine.json").write_text(plan.replace('"topology": "cpu"', '"topology": "mine"'))
        old = json.loads(plan)
        old["prediction"].pop("contents")
        old["prediction"]["tables"][0]["table"] = "t_item"
        Path("old.json").write_text(json.dumps(old))
        for number, ratio in enumerate((0.3, 0.3, 0.5, 0.5)):
            run, varied = Path("sweep/runs", str(number)), {"cache.ratio": ratio, "train.seed": number}
            shutil.copytree("long", run)
            text = (run / "config.toml").read_text()
            (run / "config.toml").write_text(re.sub("(?m)^seed = 0", f"seed = {number}", text))
            when = "2026-11-25T00:00:00+00:00"
            keep_outcome(
                Outcome(run.name, run.name, 0, 1, varied, "finished", "", 1.0, when, 1, group=f"{ratio}"), Path("sweep")
            )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("row", "command"), cases([*OF_REPORTS, *OF_COMPARISONS]))
def test_what_is_advised_of_reports_helps(
    row: Remedy,
    command: str,
    tmp_path_factory: pytest.TempPathFactory,
    one_rank_here: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr("embershard.commands.train.run.lock_run_dir", lambda _: None)  # it holds until a process ends
    shutil.copytree(_made(tmp_path_factory.getbasetemp() / "reported"), ".", dirs_exist_ok=True)
    check(row, command, capsys)
