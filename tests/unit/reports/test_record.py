"""The run's record and what the screen says of it."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import re
import subprocess
import sys
from array import array
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console

from embershard.cache import TableStats
from embershard.cache.totals import RunCaches
from embershard.commands.train.run import _Outputs
from embershard.data import DataConfig, SyntheticConfig, Target, open_source
from embershard.data.block import BadRow
from embershard.distributed import Ranks
from embershard.distributed.sent_bytes import SentBytes
from embershard.errors import ConfigError
from embershard.launch.run_dir import check_run_dir, lock_run_dir
from embershard.launch.versions import git_commit, versions
from embershard.reports.progress import ProgressDisplay, closing_table
from embershard.reports.record import RunRecord, make_result, steady_steps
from embershard.run_result import HotColdTotals, LookAheadTotals, RunResult, SentTotals
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.reports import (
    BadRowsReport,
    EvalReport,
    FailedSaveReport,
    SaveReport,
    SkippedBatchReport,
    StopReport,
    TrainReport,
)

KEYS = {
    "steps", "samples", "samples_per_second", "step_ms", "loss", "auc", "ne", "logloss", "world_size",
    "device", "cache", "versions", "git_commit",
}  # fmt: skip


UNKNOWN = {"samples": 0, "auc": None, "ne": None, "logloss": None}


def train_report(step: int) -> TrainReport:
    sent = SentBytes(ids=1e6, gradients=2e6, other=9e9)
    return TrainReport(step, 0, step * 8, 0.5, UNKNOWN, 1234.5, 0.25, 0.75, 30.0, 20.0, 1.0, sent)


def eval_report(step: int) -> EvalReport:
    return EvalReport(
        step, {"samples": 10, "auc": 0.7, "ne": 0.9, "logloss": 0.4, "accuracy": 0.8, "calibration": 1.1}, 0.1
    )


def result(step_seconds=(*[9.0] * 10, *[0.1] * 30), loss=0.5, is_evaluated=True, **changes):
    """Of a trainer that took so long for its steps."""
    trainer: Any = SimpleNamespace(
        config=RunConfig(train=TrainConfig(batch_size=10)),
        ranks=Ranks(0, 2, 0, 2, torch.device("cpu")),
        plan=None,
        source=open_source(DataConfig(synthetic=SyntheticConfig(num_samples=100, scale=0.0001))),
        target=Target(),
        steps=40,
        state=SimpleNamespace(changes=()),
        samples=800,
        step_seconds=array("d", step_seconds),
    )
    sent = SentTotals(ids=8e6, embeddings=4e7, gradients=4e7, dense_all_reduce=8e5, other=1e3, ranks=())
    totals = {"cache": None, "look_ahead": None, "sent_bytes": sent, "skipped_batches": 3, **changes}
    last = None if loss is None else SimpleNamespace(loss=loss, label_losses={})
    return make_result(trainer, last, eval_report(40) if is_evaluated else None, totals)


def test_result_has_the_promised_keys_and_counts_speed_after_the_warm_up():
    found = result()
    assert set(found.to_dict()) >= KEYS
    assert found.skipped_batches == 3
    assert found.samples_per_second == pytest.approx(2 * 10 / 0.1)
    assert (found.step_ms.p50, found.step_ms.p95) == (pytest.approx(100.0), pytest.approx(100.0))
    assert found.quality.items() >= {"auc": 0.7, "ne": 0.9, "logloss": 0.4}.items()
    assert found.cache is None


@pytest.mark.parametrize(
    ("num_steps", "lookahead", "counted", "is_steady"),
    [
        (100, 0, range(10, 100), True),
        (100, 64, range(10, 55), False),
        (200, 64, range(10, 136), True),
        (4, 2, range(1, 3), False),
        (1, 64, range(1), False),
        (0, 64, range(0), False),
        (8, 3, range(2, 5), True),
    ],
)
def test_speed_is_that_of_steps_with_something_left_to_read_ahead(num_steps, lookahead, counted, is_steady):
    assert steady_steps([float(step) for step in range(num_steps)], lookahead) == ([*map(float, counted)], is_steady)


def test_result_of_a_run_that_had_nothing_to_do():
    found = result(step_seconds=[], loss=None, is_evaluated=False)
    assert (found.samples_per_second, found.step_ms.p50, found.quality["auc"]) == (None, None, None)
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_resumed_run_writes_on_from_its_checkpoint(tmp_path: Path):
    record = RunRecord(tmp_path, RunConfig(), None)
    for report in (train_report(5), SaveReport(5, tmp_path / "step_5", 0.1, 0.1), train_report(10), eval_report(10)):
        record.add(report)
    record.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra')
    record = RunRecord(tmp_path, RunConfig(), 5)
    record.add(train_report(10))
    record.add(FailedSaveReport(10, "no space"))
    record.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    kinds = [(line["kind"], line["step"]) for line in lines]
    assert kinds == [("train", 5), ("checkpoint", 5), ("train", 10), ("failed_checkpoint", 10)]


def test_a_run_that_is_killed_while_it_writes_leaves_no_half_of_a_file(tmp_path: Path, monkeypatch):
    """A sweep takes a run with a result for finished, and a resume reads the settings."""
    record = RunRecord(tmp_path, RunConfig(), None)
    settings = (tmp_path / "config.toml").read_text()
    monkeypatch.setattr("os.replace", mock.Mock(side_effect=SystemExit))  # after the contents, before the name
    with pytest.raises(SystemExit):
        result().write(tmp_path)
    assert not (tmp_path / "result.json").exists()
    with pytest.raises(SystemExit):
        RunRecord(tmp_path, RunConfig(train=TrainConfig(max_steps=7)), 5)
    assert (tmp_path / "config.toml").read_text() == settings
    record.close()


def test_what_comes_again_after_a_resume_stands_once(tmp_path: Path):
    """The evaluation of the checkpoint's step, and the batches that were skipped after it."""
    first = [train_report(20), SkippedBatchReport(20, "nan", 0, 210), eval_report(20), StopReport(20, None)]
    record = RunRecord(tmp_path, RunConfig(), None)
    assert all(record.add(report) for report in [*first, train_report(21), eval_report(21)])
    record.close()
    record = RunRecord(tmp_path, RunConfig(), 20)
    again = [*first[1:], SkippedBatchReport(20, "nan", 0, 220), train_report(21), eval_report(21)]
    assert [record.add(report) for report in again] == [False, False, False, True, True, True]
    record.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [(line["kind"], line["step"], line.get("sample")) for line in lines]
    assert found == [
        ("train", 20, None), ("skipped_batch", 20, 210), ("eval", 20, None), ("stop", 20, None),
        ("skipped_batch", 20, 220), ("train", 21, None), ("eval", 21, None),
    ]  # fmt: skip


@pytest.mark.slow
def test_metrics_and_tensorboard_agree_on_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its second part repeats what its first part did after the checkpoint of step 20; the third goes on from 30."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    saved = SaveReport(20, tmp_path / "step_20", 0.1, 0.1)
    skipped = SkippedBatchReport(20, "nan", 0, 210)
    parts = {
        None: [train_report(20), skipped, train_report(21), saved, eval_report(20), eval_report(21)],
        20: [skipped, eval_report(20), train_report(30), eval_report(30)],
        30: [eval_report(30), train_report(40), eval_report(40)],
    }
    for started_at, (resumed_at, reports) in enumerate(parts.items(), start=1_700_000_000):
        # TensorBoard reads files in the order of their names, which begin with the second.
        monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda second=started_at: second))
        trainer: Any = SimpleNamespace(config=RunConfig(), plan=None, total_steps=40, steps=resumed_at or 0, parts=[])
        trainer.ranks = SimpleNamespace(world_size=2, device=torch.device("cpu"))
        trainer.source = SimpleNamespace(chunks=lambda split: SimpleNamespace(num_samples=100))
        with closing(_Outputs(trainer, tmp_path, resumed_at, Console(file=io.StringIO()))) as outputs:
            for report in reports:
                outputs.add(report)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    shown = {"train": "train/loss", "eval": "eval/auc", "skipped_batch": "skipped_batch/sample"}
    for kind, steps in (("train", [20, 30, 40]), ("eval", [20, 30, 40]), ("skipped_batch", [20])):
        assert [line["step"] for line in lines if line["kind"] == kind] == steps
        assert [each.step for each in events.Scalars(shown[kind])] == steps


@pytest.mark.slow
def test_a_resumed_run_has_no_result_until_it_ends(tmp_path: Path):
    RunRecord(tmp_path, RunConfig(), None).close()
    result().write(tmp_path)
    assert RunResult.find(tmp_path) == result()
    RunRecord(tmp_path, RunConfig(), 50).close()
    assert RunResult.find(tmp_path) is None, "the result of the steps that were trained before"


def test_damaged_lines_are_kept_aside_and_the_rest_stays(tmp_path: Path):
    record = RunRecord(tmp_path, RunConfig(), None)
    for step in (1, 2, 3):
        record.add(train_report(step))
    record.close()
    metrics = tmp_path / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    damaged = [b"\xff\x00 half a line\n", b'{"kind": "train"}\n', b"[1]\n", b'{"step": 3, "ki']
    metrics.write_bytes(b"".join([lines[0], *damaged[:3], lines[1], lines[2], damaged[3]]))
    RunRecord(tmp_path, RunConfig(), 2).close()
    assert metrics.read_bytes() == lines[0] + lines[1]
    assert (tmp_path / "metrics.damaged.jsonl").read_bytes() == b"".join(damaged) + b"\n"


def test_bad_rows_are_listed_once_and_not_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("embershard.reports.record._MOST_BAD_ROWS", 3)
    rows = [BadRow(Path("a[/x]"), number, "C1", f"C1='\n{number}': needed") for number in range(5)]
    record = RunRecord(tmp_path, RunConfig(), None)
    record.add(BadRowsReport(1, 2, tuple(rows[:2])))
    record.add(BadRowsReport(2, 4, tuple(rows[1:3])))
    record.close()
    record = RunRecord(tmp_path, RunConfig(), 1)
    record.add(BadRowsReport(2, 5, tuple(rows)))
    record.close()
    lines = [json.loads(line) for line in (tmp_path / "bad_rows.jsonl").read_text().splitlines()]
    assert [(line["file"], line["row"], line["column"]) for line in lines] == [("a[/x]", n, "C1") for n in range(3)]


def test_another_run_is_not_overwritten(tmp_path: Path):
    RunRecord(tmp_path, RunConfig(), None).close()
    with pytest.raises(ConfigError, match=r"holds a run already.*--resume"):
        RunRecord(tmp_path, RunConfig(), None)


def test_checkpoints_alone_are_a_run_too(tmp_path: Path):
    (tmp_path / "checkpoints" / "step_5").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"holds a run already.*--resume"):
        check_run_dir(tmp_path, resume=False)
    check_run_dir(tmp_path, resume=True)


def test_plain_lines_when_not_a_terminal():
    screen = io.StringIO()
    display = ProgressDisplay(Console(file=screen, force_terminal=False), 20, 0)
    saved = SaveReport(10, Path("r/step_10"), 12.34, 0.2)
    failed = FailedSaveReport(20, "no space.")
    waiting = dataclasses.replace(saved, stall_seconds=12.34, why_whole="the first one")
    saves = (saved, waiting, failed, dataclasses.replace(failed, run_ends=True))
    for report in (train_report(10), eval_report(10), *saves):
        display.show(report)
    display.close()
    first, second, third, fourth, fifth, sixth = screen.getvalue().splitlines()
    assert first.startswith("step 10/20  1,234 samples/s  loss 0.5000  AUC n/a  hit rate 75.0%  sent 2.86 MiB/step  ")
    assert second.startswith("step 10: held-out AUC 0.7000  NE 0.9000")
    assert third == "step 10: saved r/step_10 (12.3 s; training waited 0.2 s)"
    assert fourth == "step 10: saved r/step_10 (12.3 s; whole: the first one)"
    assert fifth == "no space. Training goes on (checkpoint.on_failed_save)."
    assert sixth == "no space."


def test_a_line_of_dealt_samples_has_the_slowest_rank_s_cost_dealt_and_undealt():
    screen = io.StringIO()
    display = ProgressDisplay(Console(file=screen, force_terminal=False, width=200), 20, 0)
    report = train_report(10)
    display.show(dataclasses.replace(report, deal={"dealt": 1.0049, "undealt": 1.3962}))
    display.close()
    assert "sent 2.86 MiB/step  slowest rank 1.00 x mean cost, undealt 1.40" in screen.getvalue()
    assert "slowest rank" not in report.line()


def test_the_time_that_is_left_is_that_of_the_steps_so_far(monkeypatch):
    """Of a run that went on at step 5, whose five steps took 20 seconds: ten more take 40."""
    screen, clock = io.StringIO(), [100.0]
    monkeypatch.setattr("embershard.reports.progress.time.monotonic", lambda: clock[0])
    display = ProgressDisplay(Console(file=screen, force_terminal=False, width=200), 20, 5)
    clock[0] = 120.0
    display.show(train_report(10))
    assert screen.getvalue().endswith("  ETA 40 s\n")


@pytest.mark.parametrize("quality", [{"samples": 10, "auc": None, "ne": None}, {"samples": 10, "rmse": None}])
def test_weights_of_0_alone_are_said_once(quality):
    screen = io.StringIO()
    display = ProgressDisplay(Console(file=screen, force_terminal=False, width=200), 20, 0)
    display.show(eval_report(5))
    assert "weight 0" not in screen.getvalue()
    for _ in range(2):
        display.show(dataclasses.replace(eval_report(10), quality=quality))
    said = "step 10: warning: all 10 held-out samples have weight 0 (data.table.weight)"
    assert screen.getvalue().count("weight 0") == screen.getvalue().count(said) == 1


def test_a_bar_on_a_terminal():
    screen = io.StringIO()
    display = ProgressDisplay(Console(file=screen, force_terminal=True, width=80, color_system=None), 20_000, 0)
    quality = {**UNKNOWN, "auc": 0.75}
    display.show(dataclasses.replace(train_report(10_000), quality=quality, samples_per_second=1e6))
    display.close()
    text = screen.getvalue()
    for said in ("10000/20000", "1,000,000/s loss 0.5000 AUC 0.7500 hit 75.0%", "ETA"):
        assert said in text
    assert "…" not in text


@pytest.mark.parametrize(("is_terminal", "said"), [(False, "ETA at most "), (True, "ETA ≤ ")])
def test_a_run_that_may_end_early_takes_at_most_so_long(is_terminal: bool, said: str):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=is_terminal, width=80, color_system=None)
    display = ProgressDisplay(console, 20_000, 0, may_end_early=True)
    display.show(dataclasses.replace(train_report(10_000), quality={**UNKNOWN, "auc": 0.75}, samples_per_second=1e6))
    display.close()
    assert said in screen.getvalue()
    assert "…" not in screen.getvalue()


def test_what_is_undefined_is_shown_as_such():
    assert "AUC n/a" in train_report(1).line()
    assert train_report(1).line().endswith("  sent 2.86 MiB/step")  # of other: not of training
    assert "AUC n/a" in EvalReport(1, {"samples": 3, "logloss": 0.1, "auc": None}, 0.1).line()


@pytest.mark.slow
def test_closing_table_with_and_without_a_cache():
    counts = {
        "rows": 100, "slots": 10, "lookups": 50, "unique_ids": 40, "hits_unique": 20, "hits_lookups": 40,
        "fills": 20, "critical_path_fills": 20, "write_backs": 5, "evictions": 10, "overflow_growths": 0,
        "bytes_to_device": 2**20, "bytes_to_host": 2**20, "device_bytes": 2**21, "host_bytes": 2**24,
        "seconds": 0.1, "stall_seconds": 0.05,
    }  # fmt: skip
    ahead = LookAheadTotals(
        steps=50, lookahead_min=60, lookahead_mean=63.5, prefetch_min=1, prefetch_mean=1.8,
        max_known_bytes=2**20, stall_seconds=0.1, uses_worker=True,
    )  # fmt: skip
    screen = io.StringIO()
    console = Console(file=screen, width=140)
    tables = [TableStats(table=name, **counts) for name in ("a", "b")]
    cache = RunCaches.of(tables, ratio=0.1, tables={}, ranks=())
    console.print(closing_table(result(cache=cache, look_ahead=ahead), "dlrm on synthetic data"))
    text = screen.getvalue()
    for said in ("20 of 200", "10.0%", "80.0%", "50", "4.00 MiB device", "200 samples/s", "0.7000"):
        assert said in text
    for said in ("63.5 batches known", "1.8 of them on the device", "2.00 ms a step"):
        assert said in text
    packed = HotColdTotals(hot_rows=30, hot_samples=0.4, batches={"cold": 3, "hot": 2})
    hot = RunCaches.of(tables, hot_bytes=2**21, hot_lookups=300, ratio=0.1, tables={}, ranks=())
    console.print(closing_table(dataclasses.replace(result(cache=hot), hot_cold=packed), "dlrm"))
    for said in ("50 of 200", "25.0%", "95.0%", "6.00 MiB device", "2.00 MiB device", "300 lookups, all hits", "80.0%"):
        assert said in screen.getvalue()[len(text) :]
    console.print(closing_table(result(), "dlrm"))
    assert "all embedding rows are on the device" in screen.getvalue()
    assert re.search(r"held out +│ 10 samples +│ of 100: the last 10% of all samples", screen.getvalue())
    assert "best AUC" not in screen.getvalue()
    for best in ({"keeps_best": True, "stopped_early": True}, {"was_improving": True}):
        found = RunResult.of({**result().to_dict(), "best": {"step": 20, "metric": "auc", "value": 0.75}, **best})
        console.print(closing_table(found, "dlrm"))
    for said in (
        "best AUC",
        "0.7500",
        "step 20, kept for predict, eval and export; training stopped early",
        "not kept",
        "longer training may be better: train.epochs",
    ):
        assert said in screen.getvalue()


@pytest.mark.slow
def test_closing_table_of_a_resumed_run_on_one_rank():
    changes = {"world_size": 1, "measured_steps": 30, "bad_rows": 2, "eval_samples": 9, "is_steady": False}
    found = RunResult.of({**result().to_dict(), **changes})
    screen = io.StringIO()
    Console(file=screen, width=140).print(closing_table(found, "dlrm"))
    for said in (
        "1 CPU process ",
        "it holds all batches and tables",
        "; 9 of them judged: bad rows are left out",
        "of the 30 steps since the resume",
        "(not steady yet)",
    ):
        assert said in screen.getvalue()
    assert re.search(r"resumed +│ at step 10", screen.getvalue())
    Console(file=screen, width=140).print(closing_table(result(), "dlrm"))
    assert screen.getvalue().count("resumed") == 1


def test_files_on_a_full_disk_are_named(tmp_path, monkeypatch):
    record = RunRecord(tmp_path, RunConfig(), None)

    class Full(io.StringIO):
        name = str(tmp_path / "metrics.jsonl")

        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        close = flush

    monkeypatch.setattr(record, "_metrics", Full())
    for write in (lambda: record.add(train_report(1)), record.close):
        with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/metrics.jsonl'"):
            write()


def test_versions_and_commit():
    assert {"python", "torch", "torchrec"} <= set(versions())
    commit = git_commit()
    assert commit is None or len(commit) == 40


@pytest.mark.slow
def test_a_run_folder_takes_one_writer_at_a_time(tmp_path):
    """Killing a launcher leaves its ranks running for a while: a second run must not write into their folder."""
    code = """
import pathlib, sys
from embershard.launch.run_dir import lock_run_dir
lock_run_dir(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="is in use by another run"):
            lock_run_dir(tmp_path)
        holder.communicate("")
    lock_run_dir(tmp_path)  # it ended, so the folder is free
