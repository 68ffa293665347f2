"""Saves without a run: what one beside training leaves in memory, and which reports and errors come when."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from embershard.distributed import CheckpointConfig, Ranks, TensorBlocks
from embershard.errors import FailedSaveError
from embershard.training.checkpoint.run_state import PreparedSave
from embershard.training.parts.saves import Saves
from embershard.training.reports import FailedSaveReport, SaveReport

Prepared = list[weakref.ref[TensorBlocks]]


def preparing(folder: Path, step: int, made: Prepared | None = None) -> Callable[[int], PreparedSave]:
    """Return what prepares a checkpoint of one tensor, and notes it in `made`."""

    def prepare(copy_bytes: int) -> PreparedSave:
        blocks = TensorBlocks({"w": torch.ones(3)}, copy_bytes=copy_bytes)
        if made is not None:
            made.append(weakref.ref(blocks))
        return PreparedSave(folder, step, blocks, [], {}, 9, "run")

    return prepare


def failing(*steps: int) -> mock._patch[Callable[..., Path]]:
    """Have saves of these steps fail as on a full disk."""
    write = PreparedSave.write

    def maybe(prepared: PreparedSave, *words: Any) -> Path:
        if prepared.step in steps:
            raise FailedSaveError(f"step {prepared.step}: full")
        return write(prepared, *words)

    return mock.patch.object(PreparedSave, "write", maybe)


def run_like(config: CheckpointConfig, ranks: Ranks) -> Any:
    """What saves know of a run."""
    return SimpleNamespace(config=SimpleNamespace(checkpoint=config), ranks=ranks, steps=0, saved_step=None)


def at(saves: Saves, folder: Path, step: int, made: Prepared | None = None) -> Saves:
    """Have the run at this step, whose checkpoint goes to this folder."""
    saves.run.steps, saves.prepare = step, preparing(folder, step, made)  # type: ignore[method-assign]
    return saves


def begun(config: CheckpointConfig, ranks: Ranks, folder: Path, step: int) -> Saves:
    """Start a save beside training; it may end at any time."""
    saves = at(Saves(run_like(config, ranks)), folder, step)
    assert list(saves.start()) == []
    return saves


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_that_ended_leaves_nothing_in_memory(ranks, tmp_path, monkeypatch, fails):
    """Not even until the garbage collector comes: it comes rarely where few objects hold much memory."""
    made, config = Prepared(), CheckpointConfig(every_steps=1, on_failed_save="continue")
    saves = at(Saves(run_like(config, ranks)), tmp_path, 1, made)

    def full(*_: Any) -> None:
        raise OSError(28, "full")

    if fails:
        monkeypatch.setattr("embershard.distributed.checkpoint.digests._DigestedFile.write", full)
    gc.collect()
    gc.disable()
    try:
        reports = [*saves.start(), *saves.last()]
        assert [type(report) for report in reports] == [FailedSaveReport if fails else SaveReport]
        assert [blocks() for blocks in made] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("setting", ["stop", "continue"])
def test_a_save_in_between_saves_its_step_and_keeps_the_report_of_the_one_before(ranks, tmp_path, setting):
    config = CheckpointConfig(every_steps=1, on_failed_save=setting)
    saves = begun(config, ranks, tmp_path / "well", 1)
    assert at(saves, tmp_path / "well", 2).write().step == 2
    assert [(type(report), report.step) for report in saves.before_batch()] == [(SaveReport, 1)]
    assert list(saves.before_batch()) == []
    with failing(3):
        saves = begun(config, ranks, tmp_path / "full", 3)
        assert at(saves, tmp_path / "full", 4).write().step == 4
        if setting == "stop":
            with pytest.raises(FailedSaveError, match="step 3: full"):
                list(saves.before_batch())
        else:
            assert list(saves.before_batch()) == [FailedSaveReport(3, "step 3: full")]
    assert saves.run.saved_step == 4


def test_where_the_input_fails_the_step_is_saved_whatever_became_of_the_save_before(ranks, tmp_path):
    with failing(3), suppress(FailedSaveError):
        saves = begun(CheckpointConfig(every_steps=1), ranks, tmp_path, 3)
        reports = list(at(saves, tmp_path, 4).at_failure())
    assert [(type(report), report.step) for report in reports] == [(FailedSaveReport, 3), (SaveReport, 4)]
    assert (tmp_path / "step_4").is_dir()


@pytest.mark.slow
def test_a_save_of_the_step_that_failed_beside_training_is_tried_again(ranks, tmp_path):
    with failing(3):
        saves = begun(CheckpointConfig(every_steps=1), ranks, tmp_path, 3)
        saves.wait()
    assert saves.write().path.is_dir()
    assert list(saves.last()) == []
