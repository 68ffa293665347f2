"""A run goes on from its newest valid checkpoint, says what it did not use, and never loses one."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from embershard.distributed import CheckpointConfig, Ranks
from embershard.errors import CheckpointError, InvalidCheckpointError
from embershard.training.checkpoint.resume import Resumed, resume_run
from embershard.training.reports import TrainReport
from embershard.training.trainer import Trainer
from tests.covering import covering
from tests.unit.distributed.checkpoints import DAMAGES
from tests.unit.training.test_trainer import losses, make_config

pytestmark = pytest.mark.slow  # whole training runs

CONFIG = make_config(checkpoint=CheckpointConfig(every_steps=6, at_end=False, keep_last=3))


@pytest.fixture(scope="module")
def whole(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """The checkpoints of a run, of steps 6, 12 and 18, and its losses."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = Trainer(CONFIG, ranks, folder)
    found = losses(list(trainer.train()))
    trainer.close()
    return folder, found


@pytest.fixture
def trainer(ranks: Ranks, whole: tuple[Path, dict[int, float]], tmp_path: Path) -> Iterator[Trainer]:
    shutil.copytree(whole[0], tmp_path / "c")
    made = Trainer(CONFIG, ranks, tmp_path / "c")
    yield made
    made.close()


def folder_of(trainer: Trainer) -> Path:
    assert trainer.checkpoints is not None
    return trainer.checkpoints


@pytest.mark.parametrize(
    ("name", "damage"), covering((".metadata", "__0_0.distcp", "manifest.json", "scalars.json"), tuple(DAMAGES))
)
def test_an_older_one_is_used(trainer, name, damage):
    folder = folder_of(trainer)
    damage(folder / "step_18" / name, folder / "step_12" / name)
    resumed = resume_run(trainer)
    assert resumed.checkpoint == folder / "step_12"
    assert (resumed.is_verified, resumed.set_aside, trainer.steps) == (True, ("step_18.aside",), 12)
    (reason,) = resumed.skipped
    assert f"step_18: {name}" in reason or name in reason


def test_the_run_after_a_fallback_is_the_run(trainer, whole):
    """It saves under the names of the invalid ones again, and removes none that is valid too early."""
    folder = folder_of(trainer)
    (folder / "step_18" / "scalars.json").unlink()
    (folder / "step_12" / "manifest.json").write_text("{}")
    (folder / "step_999").mkdir()
    resumed = resume_run(trainer)
    assert resumed.checkpoint == folder / "step_6"
    skipped = [Path(text.partition(": ")[0]).name for text in resumed.skipped]
    assert skipped == ["step_999", "step_18", "step_12"]
    assert not any(text.endswith(".") for text in resumed.skipped), "the sentence goes on"
    rest = [report for report in trainer.train() if isinstance(report, TrainReport)]
    assert losses(rest) == {step: loss for step, loss in whole[1].items() if step > 6}
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["step_12", "step_12.aside", "step_18", "step_18.aside", "step_6", "step_999.aside"]


def test_a_step_can_be_chosen(trainer, whole):
    folder = folder_of(trainer)
    resumed = resume_run(trainer, step=6)
    assert dataclasses.replace(resumed, comparison=None) == Resumed(
        folder / "step_6", True, (), ("step_12.aside", "step_18.aside")
    )
    assert losses(list(trainer.train())) == {step: loss for step, loss in whole[1].items() if step > 6}


def test_a_chosen_one_is_not_replaced_by_another(trainer):
    folder = folder_of(trainer)
    (folder / "step_12" / "scalars.json").unlink()
    with pytest.raises(InvalidCheckpointError, match=r"step_12: scalars\.json: is missing.*only it was asked for"):
        resume_run(trainer, step=12)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7; there is step_6, step_12, step_18"):
        resume_run(trainer, step=7)
    assert (trainer.steps, len(list(folder.iterdir()))) == (0, 3)


def test_nothing_valid_is_no_start_from_the_beginning(trainer):
    folder = folder_of(trainer)
    for step in (6, 12, 18):
        (folder / f"step_{step}" / "manifest.json").unlink()
    with pytest.raises(InvalidCheckpointError, match=r"none of 3: .*step_18: .*step_12: .*step_6: .*--unverified"):
        resume_run(trainer)
    resumed = resume_run(trainer, allow_unverified=True)
    assert (resumed.checkpoint, resumed.is_verified) == (folder / "step_18", False)


def test_another_model_is_no_reason_for_an_older_one(trainer, ranks):
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, table_dtype="fp16"))
    other = Trainer(config, ranks, folder_of(trainer))
    with pytest.raises(CheckpointError, match=r"step_18 was saved by a run with other settings"):
        resume_run(other)
    other.close()


def test_no_checkpoint_is_the_beginning(ranks, tmp_path):
    trainer = Trainer(CONFIG, ranks, tmp_path / "new")
    assert resume_run(trainer) == Resumed()
    with pytest.raises(CheckpointError, match="no checkpoint of step 3; there is no complete checkpoint"):
        resume_run(trainer, step=3)
    trainer.close()


def test_a_run_keeps_its_id(trainer, whole, ranks):
    made = trainer.state.run_id
    resume_run(trainer)
    assert trainer.state.run_id != made
    assert trainer.state.run_id in (folder_of(trainer) / "step_6" / "manifest.json").read_text()
