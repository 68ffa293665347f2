"""A run that follows a folder: what happens while it waits, what ends it, and what it notes before it trains."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from embershard.cache import CacheConfig
from embershard.distributed import CheckpointConfig, Ranks
from embershard.distributed.supervision import BEATS
from embershard.errors import CheckpointError, ConfigError, DataError
from embershard.extras.following.followed import FollowedSource
from embershard.extras.following.part import FolderFollower, FollowedFolder
from embershard.extras.publications.part import Publishing
from embershard.frequency.config import ProfileConfig
from embershard.training.checkpoint.resume import resume_run
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.reports import Report, SaveReport, StopReport
from embershard.training.trainer import Trainer
from tests.ranks.following import arriving, make_following, noting
from tests.ranks.time_order import GLOBAL_BATCH, Trained, write_clicks

pytestmark = [pytest.mark.extra, pytest.mark.slow]
OF_FILE = 200 // GLOBAL_BATCH  # steps
MOST_WAITS = 20_000


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return sorted(write_clicks(tmp_path / "clicks").iterdir())


def make_config(tmp_path: Path, **options: Any) -> RunConfig:
    (tmp_path / "followed").mkdir(exist_ok=True)
    config = make_following(tmp_path / "followed", 5, **options)
    return replace(config, checkpoint=CheckpointConfig(every_steps=OF_FILE, keep_last=9))


def trained(trainer: Trainer) -> list[list[float]]:
    found = Trained()
    noting(trainer, found)
    list(trainer.train())
    trainer.close()
    return found.samples


@pytest.mark.smoke
def test_saves_and_publications_do_not_wait_for_a_batch(ranks: Ranks, files: list[Path], tmp_path: Path) -> None:
    """The second file comes only when the checkpoint of the first one's last step is there, and was published."""
    config, cuts, waits = make_config(tmp_path, idle_seconds=None), list[int](), list[int]()
    with arriving([], tmp_path / "followed"):
        trainer = Trainer(config, ranks, tmp_path / "run" / "checkpoints")
        publishing, follower = Publishing(trainer), trainer.part(FollowedFolder).follower
        publishing.publisher = SimpleNamespace(  # type: ignore[assignment]
            begin=lambda run_id, *_: run_id, is_due=lambda step: True, cut=cuts.append, reports=lambda: iter(()),
            end=lambda step: iter(()), before_save=lambda step: None, newest=None, close=lambda: None,
        )  # fmt: skip
        trainer.parts.insert(0, publishing)
        write_next, inner = _one_by_one(files, tmp_path / "followed"), follower.wait

        def wait() -> bool:
            waits.append(trainer.steps)
            assert waits.count(trainer.steps) < MOST_WAITS, "a save is held up"
            return inner()

        follower.wait = wait  # type: ignore[method-assign]
        write_next()
        for report in trainer.train():
            if isinstance(report, SaveReport) and len(cuts) and report.step < 3 * OF_FILE:
                assert trainer.steps == report.step, "while it waits"
                assert cuts.count(report.step) > 1
                if report.step == 2 * OF_FILE:
                    trainer.supervision.signal = signal.SIGTERM
                write_next()
        trainer.close()
    assert trainer.supervision._pulse[BEATS] >= trainer.steps + len(waits), "its launcher sees that it lives"
    assert {OF_FILE, 2 * OF_FILE} <= set(waits)


def _one_by_one(files: list[Path], folder: Path) -> Any:
    left = list(files)

    def write_next() -> None:
        path = left.pop(0)
        (folder / f".{path.name}").write_bytes(path.read_bytes())
        (folder / f".{path.name}").rename(folder / path.name)

    return write_next


def test_a_signal_while_it_waits_ends_it_after_a_save(ranks: Ranks, files: list[Path], tmp_path: Path) -> None:
    config, run = make_config(tmp_path, idle_seconds=None), tmp_path / "run" / "checkpoints"
    config = replace(config, checkpoint=CheckpointConfig(every_steps=100))
    with arriving(files[:1], tmp_path / "followed"):
        trainer, reports = Trainer(config, ranks, run), list[Report]()
        inner = trainer.part(FollowedFolder).follower.wait

        def wait() -> bool:
            if trainer.steps:
                trainer.supervision.signal = signal.SIGTERM
            return inner()

        trainer.part(FollowedFolder).follower.wait = wait  # type: ignore[method-assign]
        reports = list(trainer.train())
        trainer.close()
    assert (type(reports[-1]), reports[-1].step) == (StopReport, OF_FILE)
    assert (run / f"step_{OF_FILE}").exists()
    with arriving(files[1:], tmp_path / "followed"):
        again = Trainer(make_config(tmp_path), ranks, run)
        resume_run(again)
        rest = trained(again)
    assert rest == _whole(ranks, files, tmp_path)[OF_FILE:]


def _whole(ranks: Ranks, files: list[Path], tmp_path: Path) -> list[list[float]]:
    folder = tmp_path / "whole"
    with arriving(files, folder):
        return trained(Trainer(make_following(folder, 5), ranks, tmp_path / "whole_run" / "checkpoints"))


def test_the_journal_has_a_file_before_it_is_offered(ranks, files, tmp_path, monkeypatch) -> None:
    noted, offer = list[list[str]](), FollowedSource.offer

    def noting_offer(self: FollowedSource, *given: Any) -> None:
        lines = (tmp_path / "run" / "files.jsonl").read_text().splitlines()
        noted.append([json.loads(line)["name"] for line in lines])
        offer(self, *given)

    monkeypatch.setattr(FollowedSource, "offer", noting_offer)
    with arriving(files, tmp_path / "followed"):
        trained(Trainer(make_config(tmp_path), ranks, tmp_path / "run" / "checkpoints"))
    names = [file.name for file in files]
    assert noted == [names[:1], names[:2], names]


def test_a_run_says_how_far_it_could_look_ahead(ranks: Ranks, files: list[Path], tmp_path: Path) -> None:
    with arriving(files, tmp_path / "followed"):
        trainer = Trainer(make_config(tmp_path), ranks, tmp_path / "run" / "checkpoints")
        trained(trainer)
    stats = trainer.upcoming.stats()
    assert stats.lookahead_min == 0, "before each wait the window is empty"
    assert stats.lookahead_mean is not None
    assert stats.lookahead_mean < 5


def test_a_file_that_changes_ends_the_run_after_a_checkpoint(ranks: Ranks, files: list[Path], tmp_path: Path) -> None:
    folder, run = tmp_path / "followed", tmp_path / "run" / "checkpoints"
    config = replace(make_config(tmp_path), checkpoint=CheckpointConfig(every_steps=100))
    with arriving(files[:2], folder):
        trainer, path = Trainer(config, ranks, run), folder / files[1].name
        take, before = trainer.part(FollowedFolder).follower.take, list[bytes]()

        def taking(*given: int) -> None:
            take(*given)
            if trainer.part(FollowedFolder).follower.source.num_files == 2 and not before:
                before.append(path.read_bytes())
                path.write_bytes(bytes(len(before[0])))

        trainer.part(FollowedFolder).follower.take = taking  # type: ignore[method-assign]
        with pytest.raises(DataError, match=rf"{files[1].name}: changed while it was read"):
            list(trainer.train())
        trainer.close()
    (saved,) = (int(path.name[5:]) for path in run.glob("step_*[0-9]"))
    assert 0 < saved <= OF_FILE, "when its rows were read, some batches ahead"
    path.write_bytes(before[0])
    with arriving(files[2:], folder):
        again = Trainer(config, ranks, run)
        resume_run(again)
        assert trained(again) == _whole(ranks, files, tmp_path)[saved:]


def test_another_journal_is_refused(ranks: Ranks, files: list[Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    with arriving(files, tmp_path / "followed"):
        trained(Trainer(make_config(tmp_path), ranks, run / "checkpoints"))
    lines = (run / "files.jsonl").read_text().splitlines(keepends=True)
    for text in ("".join(lines[:-1]), "".join(reversed(lines)), ""):
        (run / "files.jsonl").write_text(text)
        trainer = Trainer(make_config(tmp_path), ranks, run / "checkpoints")
        with pytest.raises(CheckpointError, match=r"after 3 files of a folder, and the journal of this run has"):
            resume_run(trainer)
        trainer.close()
    (run / "files.jsonl").write_text("".join(lines))
    trainer = Trainer(make_config(tmp_path), ranks, run / "checkpoints")
    resume_run(trainer)
    assert trained(trainer) == [], "nothing came"


def test_nobody_waits_longer_than_was_asked(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "followed").mkdir()
    clock = [100.0]
    monkeypatch.setattr("embershard.extras.following.part.time", SimpleNamespace(
        monotonic=lambda: clock[0], sleep=lambda seconds: clock.__setitem__(0, clock[0] + seconds)
    ))  # fmt: skip
    following = FolderFollower(make_config(tmp_path, idle_seconds=3.0).data, None, ranks)
    following.take(0, 100)
    waits = 1
    while following.wait():
        waits += 1
        assert waits < MOST_WAITS
    assert 3.0 <= clock[0] - 100.0 < 4.5
    following.close()


def test_what_needs_an_end_or_all_data_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    for change, message in (
        ({"train": TrainConfig(epochs=2)}, r"train\.epochs: got 2, needed 1 in time order"),
        ({"cache": CacheConfig(policy="frequency")}, r"data\.follow: .* set profile\.path; or choose another"),
        ({"profile": ProfileConfig(samples=9)}, r"data\.follow: .* a profile of them would be counted"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(config, **change)
    data = replace(config.data, eval_path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"need train\.eval_every with data\.follow"):
        replace(config, data=data, train=replace(config.train, early_stopping=2))
    replace(config, data=data, train=replace(config.train, early_stopping=2, eval_every=5))
