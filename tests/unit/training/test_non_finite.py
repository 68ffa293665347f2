"""A loss or a parameter that is not finite: what stops, what is skipped, and what is kept."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from embershard.data import Target
from embershard.distributed import Ranks
from embershard.distributed.sent_bytes import SentBytes
from embershard.errors import NotFiniteError
from embershard.reports.record import RunRecord, make_result
from embershard.run_result import SentTotals
from embershard.training.parts.loss_monitor import (
    MOST_FILES,
    MOST_SKIPPED_IN_A_ROW,
    KeptBatches,
    LossMonitor,
    in_float64,
)
from embershard.training.reports import SaveReport, SkippedBatchReport
from embershard.training.trainer import Trainer
from tests.covering import keep
from tests.unit.training.poisoned import CACHES, Feed, config_of, losses, run, state_of

pytestmark = pytest.mark.slow  # whole training runs


def test_reported_losses_do_not_depend_on_how_a_batch_is_divided():
    logits, labels = torch.randn(64, generator=torch.Generator().manual_seed(3)), torch.arange(64.0) % 2
    whole, *parts = [
        in_float64(Target(), torch.tensor(0.7), logits[part], labels[part], None)
        for part in (slice(64), slice(0, 16), slice(16, 32), slice(32, 48), slice(48, 64))
    ]
    assert float(sum(parts) / 4) == pytest.approx(float(whole), abs=1e-15)
    rounded = [float(part.float()) for part in parts]
    assert math.fsum(rounded) / 4 != pytest.approx(float(whole), abs=1e-15)  # the control
    assert float(in_float64(Target(), torch.tensor(math.inf), logits, labels, None)) == math.inf


def skipped_in(reports):
    return [report for report in reports if isinstance(report, SkippedBatchReport)]


@pytest.mark.parametrize("cache", keep(["look-ahead"], CACHES))
def test_a_skipped_batch_trains_nothing(ranks, cache):
    """Among them the last one that is read at first: another batch takes its place, also at the end."""
    bad = {2, 3, 7, 12}
    reports, state, trainer = run(config_of(cache), ranks, poisoned=bad)
    without, expected, _ = run(config_of(cache), ranks, left_out=bad)
    assert losses(reports) == losses(without)
    assert len(losses(reports)) == trainer.steps == 12
    assert state.keys() == expected.keys()
    assert [name for name, values in state.items() if not torch.equal(values, expected[name])] == []
    skipped = skipped_in(reports)
    assert [(report.epoch, report.sample) for report in skipped] == [(0, 200), (0, 300), (0, 700), (1, 300)]
    assert [report.step for report in skipped] == [1, 1, 4, 8]
    assert skipped[0].reason == "Step 2: the loss of rank 0 is nan."
    _, other, _ = run(config_of(cache), ranks, left_out={2, 3, 7})
    assert any(not torch.equal(values, expected[name]) for name, values in other.items())  # the control


@pytest.mark.matrix
def test_a_run_resumes_exactly_after_a_skipped_batch(ranks, tmp_path):
    whole, expected, _ = run(config_of("look-ahead"), ranks, tmp_path, poisoned={2, 9})
    resumed = Trainer(config_of("look-ahead"), ranks, tmp_path / "again")
    resumed.resume(tmp_path / "step_5")
    Feed(resumed, poisoned={9 - 6})  # six batches were read by then: five trained, one skipped
    reports = list(resumed.train())
    assert losses(reports) == losses(whole)[5:]
    (again,), (_, before) = skipped_in(reports), skipped_in(whole)
    assert (again.step, again.epoch, again.sample) == (before.step, before.epoch, before.sample) == (7, 0, 900)
    assert all(torch.equal(values, expected[name]) for name, values in state_of(resumed).items())
    resumed.close()


def test_epochs_end_with_their_data(ranks):
    reports, _, trainer = run(config_of(max_steps=None, epochs=1), ranks, poisoned={1, 9})
    assert len(losses(reports)) == trainer.steps == 7
    assert trainer.samples == 700


def test_a_run_that_stops_names_the_batch_and_the_checkpoint(ranks, tmp_path):
    with pytest.raises(NotFiniteError) as stopped:
        run(config_of(on_non_finite="stop"), ranks, tmp_path / "checkpoints", poisoned={7})
    file = tmp_path / "non_finite" / "step_7_rank_0.pt"
    assert str(stopped.value).startswith(
        f"Step 7: the loss of rank 0 is nan. Its batch is in {file}. Lower the learning"
    )
    assert str(stopped.value).endswith(f"The newest checkpoint is {tmp_path / 'checkpoints' / 'step_5'}.")
    kept = torch.load(file, weights_only=True)
    assert (kept["step"], kept["rank"]) == (7, 0)
    assert torch.isnan(kept["dense_features"]).nonzero().tolist() == [[3, 2]]
    assert kept["labels"].shape == (100,)
    assert len(kept["lengths"]) == len(kept["features"]) * 100
    assert kept["lengths"].sum() == len(kept["values"])


def test_too_many_batches_in_a_row_stop_the_run(ranks, tmp_path):
    poisoned = set(range(4, 4 + MOST_SKIPPED_IN_A_ROW + 1))
    with pytest.raises(NotFiniteError, match=f"the {MOST_SKIPPED_IN_A_ROW} batches before, which were skipped"):
        run(config_of(max_steps=40, epochs=9), ranks, tmp_path / "c", poisoned=poisoned)
    reports, _, _ = run(config_of(max_steps=20, epochs=9), ranks, poisoned=poisoned - {9})
    assert len(losses(reports)) == 20
    names = {file.name for file in (tmp_path / "non_finite").iterdir()}
    numbered = {f"step_4_batch_{number}_rank_0.pt" for number in range(2, MOST_SKIPPED_IN_A_ROW + 2)}
    assert names == {"step_4_rank_0.pt", *numbered}


def test_files_are_few_and_their_failure_is_no_other_failure(ranks, tmp_path, monkeypatch):
    batch = next(iter(Trainer(config_of(), ranks).stream))
    kept = KeptBatches(tmp_path / "checkpoints", ranks)
    said = [kept.keep(step, 0, batch, [math.nan]) for step in range(1, MOST_FILES + 2)]
    files = tmp_path / "non_finite"
    assert said[-2:] == [f" Its batch is in {files}/step_{MOST_FILES}_rank_0.pt.", " Its batch was not kept."]
    second = SimpleNamespace(rank=1, all_gather_objects=lambda said: [" Rank 0 wrote it.", said])
    assert KeptBatches(tmp_path / "checkpoints", second).keep(9, 0, batch, [math.nan] * 2) == " Rank 0 wrote it."
    monkeypatch.setattr(Path, "mkdir", _no_space)
    said = [KeptBatches(tmp_path / "checkpoints", ranks).keep(3, 0, batch, [math.nan])]
    assert said == [f" Its batch could not be written to {files}/step_3_rank_0.pt (No space left on device)."]


def _no_space(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_no_checkpoint_has_a_parameter_that_is_not_finite(ranks, tmp_path):
    """As after a gradient that overflowed though the loss was finite: the save comes before the next loss."""
    trainer = Trainer(config_of(), ranks, tmp_path)
    reports = trainer.train()
    while next(reports).step < 5:
        pass
    next(values for values in trainer.optimizers.dense_parameters.values() if values.ndim == 2).data[0, 0] = math.inf
    with pytest.raises(NotFiniteError, match=r"Step 5: 1 of \d+ dense parameters are not finite, '.*weight' among"):
        next(reports)
    trainer.close()
    assert not (tmp_path / "step_5").exists()


def test_a_loss_that_is_read_late_is_read_before_a_save(ranks):
    """On a GPU a step's loss is read at the next step. Here one that is read as late."""

    class LateMonitor(LossMonitor):
        def read_travelled(self) -> str:
            return super().read_travelled() if late.pop() else ""

    late: list[bool] = []
    monitor = LateMonitor(ranks)
    late += [False, True]
    monitor.add(1, torch.tensor(math.nan))
    late += [True]
    with pytest.raises(NotFiniteError, match="Step 1: the loss of rank 0 is nan"):
        monitor.check_before_save(1, {})


@pytest.mark.parametrize("skips", [False, True])
def test_a_good_step_is_one_exchange(ranks, skips):
    calls: list[torch.Size] = []

    class Counting(Ranks):
        def all_gather(self, value: torch.Tensor) -> torch.Tensor:
            calls.append(value.shape)
            return super().all_gather(value)

    monitor = LossMonitor(Counting(**dataclasses.asdict(ranks)), skips=skips)
    for step in range(1, 6):
        assert monitor.add(step, torch.tensor(0.5)) == ""
    assert calls == [torch.Size([2])] * 5, "loss and signal"


def test_a_skipped_batch_is_recorded(ranks, tmp_path):
    reports, _, trainer = run(config_of(), ranks, poisoned={3})
    record = RunRecord(tmp_path / "r", trainer.config, None)
    for report in reports:
        if not isinstance(report, SaveReport):
            record.add(report)
    record.close()
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    values = {"step": 2, "reason": "Step 3: the loss of rank 0 is nan.", "epoch": 0, "sample": 300}
    (found,) = (line for line in lines if line["kind"] == "skipped_batch")
    del found["time"]
    assert found == {"kind": "skipped_batch", **values}
    sent = SentTotals(**dataclasses.asdict(SentBytes()), ranks=())
    totals = {"cache": None, "look_ahead": None, "sent_bytes": sent, **trainer.losses.result()}
    assert make_result(trainer, None, None, totals).skipped_batches == 1
