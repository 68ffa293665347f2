"""A checkpoint that is written while training goes on holds the state of its step, bit for bit."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.serialization import get_crc32_options

from embershard.cache import CacheConfig
from embershard.cache.rows.lazy_rows import LazyRows
from embershard.distributed import CheckpointConfig, Ranks, TensorBlocks, complete_checkpoints, save_checkpoint
from embershard.errors import CacheError, CheckpointError, ConfigError, FailedSaveError
from embershard.pipeline.config import LookAheadConfig
from embershard.sharding.torchrec import FrozenRows, cached_embeddings
from embershard.training.checkpoint import run_state
from embershard.training.config import TrainConfig
from embershard.training.optimizers import EmbeddingOptimizerConfig
from embershard.training.parts import saves
from embershard.training.parts.saves import BackgroundSave, Saves
from embershard.training.reports import FailedSaveReport, SaveReport
from embershard.training.trainer import Trainer
from tests.covering import keep
from tests.small_runs import small_data
from tests.unit.distributed.test_blocks import stock_loaded
from tests.unit.training.checkpoint.test_background_save import run_like
from tests.unit.training.gated_saves import STEPS_LATE, Late, train
from tests.unit.training.test_trainer import losses, make_config, run

pytestmark = pytest.mark.slow  # whole training runs

EVERY = 6
CASES = {
    "look_ahead": {},
    "one_batch_at_a_time": {"look_ahead": LookAheadConfig(0)},
    "torchrec_weights": {"train": TrainConfig(batch_size=100, log_every=1, max_steps=14, init="torchrec")},
    "mapped": {"cache": {"host": "mmap"}},
    "all_rows_on_the_device": {"cache": {"enabled": False}},
}


def config_of(tmp_path: Path, asynchronous: bool | None = None, **changes: Any) -> Any:
    cache = {"ratio": 0.3, "policy": "lru", **changes.pop("cache", {})}
    if cache.get("host") == "mmap":
        cache["host_dir"] = str(tmp_path / "rows")
    return make_config(**{
        "cache": CacheConfig(**cache),
        "embedding_optimizer": EmbeddingOptimizerConfig(kind="adagrad", lr=0.1),
        "train": TrainConfig(batch_size=100, log_every=1, max_steps=14),
        "checkpoint": CheckpointConfig(every_steps=EVERY, at_end=False, keep_last=9, asynchronous=asynchronous),
        **changes,
    })  # fmt: skip


def different(some: Path, other: Path) -> list[str]:
    """Names of the tensors that differ between two checkpoints."""
    first, second = stock_loaded(some), stock_loaded(other)
    assert first.keys() == second.keys()
    return [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]


@pytest.mark.parametrize("case", keep(["look_ahead"], CASES))
def test_the_state_of_its_step(ranks, tmp_path, case):
    whole = run(config_of(tmp_path, False, **CASES[case]), ranks, tmp_path / "at_once")
    config = config_of(tmp_path, None, **CASES[case])
    reports, aside_bytes, reported = train(config, ranks, tmp_path / "beside")
    assert losses(reports) == losses(whole)
    assert reported is not None
    assert reported >= EVERY + STEPS_LATE, "training went on"
    assert bool(sum(aside_bytes)) is (case != "all_rows_on_the_device"), "rows changed before they were read"
    for step in (EVERY, 2 * EVERY):
        assert different(tmp_path / "at_once" / f"step_{step}", tmp_path / "beside" / f"step_{step}") == []


def test_large_tables_on_the_device_are_written_before_training_goes_on(ranks, tmp_path):
    changes = CASES["all_rows_on_the_device"]
    run(config_of(tmp_path, False, **changes), ranks, tmp_path / "at_once")
    with mock.patch.object(saves, "_COPY_BYTES", 0):
        train(config_of(tmp_path, None, **changes), ranks, tmp_path / "beside")
    assert different(tmp_path / "at_once" / "step_6", tmp_path / "beside" / "step_6") == []


@pytest.mark.matrix
@pytest.mark.parametrize("broken", ["rows", "dense"])
def test_without_copies_it_would_be_another_state(ranks, tmp_path, broken):
    run(config_of(tmp_path, False), ranks, tmp_path / "at_once")
    patched = mock.patch.object(FrozenRows, "put_aside")
    if broken == "dense":
        patched = mock.patch("embershard.distributed.checkpoint.blocks.TensorBlocks._copy", return_value=True)

    late = Late()

    def save_late(*arguments: Any, **named: Any) -> Path:
        late.go.wait(600)  # training goes on
        return save_checkpoint(*arguments, **named)

    with patched, mock.patch.object(run_state, "save_checkpoint", save_late):
        train(config_of(tmp_path), ranks, tmp_path / "beside", late)
    assert different(tmp_path / "at_once" / "step_6", tmp_path / "beside" / "step_6")


def test_a_save_pauses_between_blocks_until_training_waits_for_it(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(saves, "_PAUSE", 1e9)
    save = started_save(ranks, tmp_path)
    save._thread.join(0.5)
    assert not save.is_done
    save.wait()
    assert save.result() in complete_checkpoints(tmp_path)


def test_a_save_does_not_pause_when_training_may_soon_wait_for_it(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(saves, "_PAUSE", 1e9)
    with mock.patch.object(FrozenRows, "is_filling", True):
        save = started_save(ranks, tmp_path)
        save._thread.join(600)
        assert save.is_done


def test_a_save_that_training_waits_for_has_its_priority(ranks, tmp_path, monkeypatch):
    """Where the system allows it: a thread of the lowest priority starves on cores that others keep busy."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(saves, "_PAUSE", 1e9)  # it ends when it is awaited
    monkeypatch.setattr(saves.os, "setpriority", lambda _, thread, niceness: asked.append((thread, niceness)))
    save = started_save(ranks, tmp_path)
    save.wait()
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert asked == [(save._thread.native_id, 19), (save._thread.native_id, own)]


def started_save(ranks: Ranks, folder: Path) -> BackgroundSave:
    trainer = Trainer(config_of(folder), ranks, folder)
    with trainer.upcoming.next() as batch:
        trainer.step(batch)
    save = BackgroundSave(trainer.prepare_save(folder, 1 << 28), ranks.with_own_group())
    trainer.close()
    return save


def test_only_saves_leave_torch_checksums_out(ranks, tmp_path):
    computed, resolve = [], TensorBlocks.resolve_data

    def noted(blocks: TensorBlocks, item: Any) -> torch.Tensor:
        computed.append(get_crc32_options())
        return resolve(blocks, item)

    with mock.patch.object(TensorBlocks, "resolve_data", noted):
        run(config_of(tmp_path), ranks, tmp_path)
    assert set(computed) == {False}
    assert get_crc32_options()


def test_a_save_makes_no_row_in_host_memory(ranks, tmp_path):
    data = small_data(scale=0.003)
    with mock.patch.object(LazyRows, "make_later", LazyRows.make):  # else a thread makes rows meanwhile
        trainer = Trainer(config_of(tmp_path, data=data), ranks, tmp_path)
        for report in trainer.train():
            if report.step == 2:
                break
        hosts = [pool.host for pool in cached_embeddings(trainer.model)]
        unmade = [host._lazy.num_unmade for host in hosts]
        trainer.save()
        assert [host._lazy.num_unmade for host in hosts] == unmade
        assert sum(unmade) > 0
        trainer.close()


def test_failures_are_reported_and_training_goes_on_if_asked(ranks, tmp_path):
    config = config_of(tmp_path)
    whole = losses(run(config, ranks, tmp_path / "a"))
    full = mock.patch("embershard.distributed.checkpoint.digests._DigestedFile.write", side_effect=OSError(28, "full"))
    with full, pytest.raises(FailedSaveError, match=r"step 6 could not be saved .*\(rank 0: full\)"):
        run(config, ranks, tmp_path / "b")
    assert complete_checkpoints(tmp_path / "b") == []
    config = dataclasses.replace(
        config, checkpoint=dataclasses.replace(config.checkpoint, on_failed_save="continue", at_end=False)
    )
    with full:
        reports = run(config, ranks, tmp_path / "c")
    assert [report.step for report in reports if isinstance(report, FailedSaveReport)] == [6, 12]
    assert losses(reports) == whole


def test_saving_again_waits_and_an_error_gives_up(ranks, tmp_path):
    trainer, late = Trainer(config_of(tmp_path), ranks, tmp_path), Late()
    with late.applied():
        for _ in trainer.train():
            if trainer.steps == EVERY + 1:
                break
        assert complete_checkpoints(tmp_path) == []
        threading.Timer(0.1, late.go.set).start()
        assert trainer.save().step == EVERY + 1  # the one of step 6 ended before
        assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_6", "step_7"]
        late.go.clear()
        trainer.steps += 1
        list(trainer._saves.start())
        threading.Timer(0.1, late.go.set).start()
        with pytest.raises(ZeroDivisionError), trainer._saves:
            raise ZeroDivisionError
        assert len(complete_checkpoints(tmp_path)) == 2
        with pytest.raises(CacheError, match="given up"):
            trainer.close()
    assert not any(thread.name == "embershard-save" for thread in threading.enumerate())


def test_a_save_of_the_step_that_is_being_saved_is_that_one(ranks, tmp_path):
    trainer, late = Trainer(config_of(tmp_path), ranks, tmp_path), Late()
    with late.applied():
        for report in trainer.train():
            if report.step == EVERY:
                break
        list(trainer._saves.start())
        late.go.set()
        assert isinstance(trainer.save(), SaveReport)
        with pytest.raises(CheckpointError, match="exists already"):
            trainer.save()
    trainer.close()


def test_the_setting_is_checked(ranks):
    with pytest.raises(ConfigError, match=r"asynchronous has no effect without checkpoint\.every_steps"):
        CheckpointConfig(asynchronous=True)
    gpu = dataclasses.replace(ranks, device=torch.device("cuda"))
    with pytest.raises(ConfigError, match="got training on a GPU"):
        Saves(run_like(CheckpointConfig(every_steps=1, asynchronous=True), gpu))
    assert not Saves(run_like(CheckpointConfig(every_steps=1), gpu))._asynchronous
