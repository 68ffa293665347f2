"""Files of a followed folder that are bad, changed, or no files: what is said of each, and what goes on."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from embershard.data.sources.table.source import TableSource
from embershard.distributed import CheckpointConfig, Ranks
from embershard.errors import DataError
from embershard.extras.following import part as following
from embershard.extras.following.followed import FollowedSource
from embershard.extras.following.part import FolderFollower
from embershard.training.checkpoint.resume import resume_run
from embershard.training.config import RunConfig
from embershard.training.trainer import Trainer
from tests.faults import bad_files
from tests.ranks.following import make_following, noting
from tests.ranks.time_order import GLOBAL_BATCH, HOUR, Trained

pytestmark = pytest.mark.extra

SIZE = GLOBAL_BATCH
IN_CELLS = {
    "csv: a text among ids",
    "csv: a label that is none",
    "csv: a number that is too large",
    "csv: a cell too many",
    "parquet: an id without a row",
}


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_POLL_SECONDS", 0.0)


def config_of(folder: Path, **options: Any) -> RunConfig:
    folder.mkdir(exist_ok=True)
    config = make_following(folder, 0, **options)
    config = replace(config, data=replace(config.data, table=replace(config.data.table, files=("part_*",))))
    return replace(config, checkpoint=CheckpointConfig(every_steps=100))


def write(path: Path, first: int, count: int = SIZE) -> Path:
    """A good file of `count` samples, all of one hour."""
    numbers = list(range(first, first + count))
    columns = {"label": [number % 2 for number in numbers], "number": numbers, "user": [1] * count, "item": [2] * count}
    table = pa.table({**columns, "at": [first // SIZE * HOUR] * count})
    if path.suffix == ".csv":
        pyarrow.csv.write_csv(table, path)
    else:
        pq.write_table(table, path, row_group_size=8, write_page_checksum=True)
    return path


def bad(way: str, path: Path) -> Path:
    bad_files.spoil(way, write(path, 0))
    return path


def take_all(follower: FolderFollower, position: int = 0) -> list[str]:
    """Take what can be taken, as a run does that trains its last batch, and then waits. Return the names."""
    for number in range(40):
        follower.take(position, 10**6)
        if follower._coming is not None:
            follower._coming.exception(timeout=60)
        if number > 20:
            follower.wait()
    return [file.name for file in follower.source.files[: follower.source.num_files]]


def notices(follower: FolderFollower) -> dict[str, str]:
    return {f"{each.notice} {each.file}": each.problem for each in follower.reports(step=3)}


@pytest.mark.parametrize("way", bad_files.WAYS)
def test_each_bad_file_is_found_before_the_journal_has_it(tmp_path: Path, way: str) -> None:
    config = config_of(tmp_path / "in").data
    path = bad(way, tmp_path / "in" / f"part_0{bad_files.ending_of(way)}")
    source = FollowedSource(config, [])
    problem = str(source.examine(path, has_begun=False).problem)
    assert str(path) in problem
    if way.startswith("csv"):
        assert f"{path}:12" in problem, "the row"
        assert "needed" in problem or "must be" in problem
    good = write(tmp_path / "in" / f"part_1{bad_files.ending_of(way)}", 0)
    assert source.examine(good, has_begun=False).problem is None


@pytest.mark.parametrize("way", sorted({*bad_files.WAYS} & IN_CELLS))
def test_what_is_checked_is_what_training_finds(tmp_path: Path, way: str) -> None:
    config = config_of(tmp_path / "in").data
    path = bad(way, tmp_path / "in" / f"part_0{bad_files.ending_of(way)}")
    source = TableSource(replace(config, path=str(path), bad_rows=0.5), newest=0)
    found = [row for number in range(source.num_physical) for row in source.parse(number).bad.values()]
    assert [(each.row, each.problem) for each in source.check()] == [(each.row, each.problem) for each in found]
    assert len(found) == 1


def test_bad_rows_are_tolerated_up_to_their_share_of_all_rows(ranks: Ranks, tmp_path: Path) -> None:
    text = "csv: a text among ids"
    for share, most in ((0.5, 2), (0.02, 1), (0.01, 0)):
        config = config_of(tmp_path / f"{share}", bad_rows=share).data
        write(tmp_path / f"{share}" / "part_0.csv", 0, 40)
        for number in (1, 2):
            bad(text, tmp_path / f"{share}" / f"part_{number}.csv")
        follower = FolderFollower(config, None, ranks)
        if most == 2:
            assert take_all(follower) == ["part_0.csv", "part_1.csv", "part_2.csv"]
            assert follower.result().bad_rows == 2
        else:
            with pytest.raises(DataError, match=rf"part_{most + 1}\.csv: 1 of 20 rows are bad.* The first is .*zebra"):
                take_all(follower)
            assert follower.source.num_files == 1 + most
        follower.close()


@pytest.mark.slow
@pytest.mark.parametrize("help_with", ["mend", "remove"])
def test_what_is_before_a_bad_file_trains_and_a_resume_goes_on(ranks: Ranks, tmp_path: Path, help_with: str) -> None:
    folder, run = tmp_path / "in", tmp_path / "run"
    config = config_of(folder)
    for number in (0, 2):
        write(folder / f"part_{number}.csv", number * SIZE)
    path = bad("csv: a text among ids", folder / "part_1.csv")
    trainer, found = Trainer(config, ranks, run / "checkpoints"), Trained()
    noting(trainer, found)
    with pytest.raises(
        DataError, match=r"part_1\.csv:12 user='zebra': needed an integer.* mend it in place or move it"
    ):
        list(trainer.train())
    trainer.close()
    assert found.samples == [list(range(SIZE))]
    assert (run / "checkpoints" / "step_1").exists()
    assert "part_1" not in (run / "files.jsonl").read_text()
    path.unlink() if help_with == "remove" else write(path, SIZE)
    trainer, found = Trainer(config, ranks, run / "checkpoints"), Trained()
    resume_run(trainer)
    noting(trainer, found)
    list(trainer.train())
    trainer.close()
    last = [float(number) for number in range(2 * SIZE, 3 * SIZE)]
    assert found.samples == ([last] if help_with == "remove" else [list(range(SIZE, 2 * SIZE)), last])


def test_a_file_that_is_mended_meanwhile_ends_no_run(ranks: Ranks, tmp_path: Path) -> None:
    config = config_of(tmp_path / "in").data
    path = bad("parquet: cut short", tmp_path / "in" / "part_0.parquet")
    follower = FolderFollower(config, None, ranks)
    for _ in range(3):
        follower.take(0, 10**6)
        follower._coming.exception(timeout=60)
    write(path, 0)
    assert take_all(follower) == [path.name]
    assert follower.source.num_samples == SIZE
    follower.close()


def test_bad_files_are_left_out_until_they_change(ranks: Ranks, tmp_path: Path) -> None:
    config = config_of(tmp_path / "in", bad_files="skip").data
    for number, way in enumerate(bad_files.WAYS):
        bad(way, tmp_path / "in" / f"part_{number}{bad_files.ending_of(way)}")
    good = write(tmp_path / "in" / "part_99.csv", 0)
    follower = FolderFollower(config, tmp_path / "files.jsonl", ranks)
    assert take_all(follower) == [good.name]
    said = notices(follower)
    assert sorted(said) == sorted(f"left_out {name}" for name in follower.result().left_out)
    assert len(said) == len(bad_files.WAYS)
    assert not notices(follower), "once"
    assert "1 files of" in follower.summary
    assert f"{len(said)} bad ones were left out: part_0.csv, " in follower.summary
    write(tmp_path / "in" / "part_3.csv", SIZE)
    assert take_all(follower) == [good.name, "part_3.csv"]
    assert "part_3.csv" not in follower.result().left_out
    follower.close()


def _change(path: Path, change: str) -> None:
    if change == "removed":
        path.unlink()
    elif change == "bad":
        bad("csv: a text among ids", path)
    else:
        write(path, 7 * SIZE, 5)


@pytest.mark.parametrize("change", ["removed", "other samples", "bad"])
def test_files_of_the_journal_that_changed_are_dropped_unless_a_part_trained(ranks, tmp_path, change) -> None:
    config, journal = config_of(tmp_path / "in", bad_files="skip").data, tmp_path / "files.jsonl"
    paths = [write(tmp_path / "in" / f"part_{number}.csv", number * SIZE) for number in range(4)]
    follower = FolderFollower(config, journal, ranks)
    assert take_all(follower) == [path.name for path in paths]
    follower.close()
    _change(paths[2], change)
    whole = journal.read_bytes()
    begun = FolderFollower(config, journal, ranks)
    begun.start_at(2 * SIZE + 1)
    with pytest.raises(DataError, match=r"part_2\.csv: .* A part of this file has trained.*--resume STEP"):
        take_all(begun, 2 * SIZE + 1)
    begun.close()
    assert journal.read_bytes() == whole, "nothing was dropped"
    again = FolderFollower(config, journal, ranks)
    again.start_at(2 * SIZE)
    left = [path.name for path in paths if path is not paths[2] or change == "other samples"]
    assert take_all(again, 2 * SIZE) == left
    assert [json.loads(line)["name"] for line in journal.read_bytes().splitlines()] == left
    assert "dropped part_2.csv" in notices(again)
    again.close()


def test_what_trains_twice_or_never_is_said_once(ranks: Ranks, tmp_path: Path) -> None:
    config = config_of(tmp_path / "in").data
    first, second = (write(tmp_path / "in" / f"part_{number}.csv", number * SIZE) for number in range(2))
    follower = FolderFollower(config, None, ranks)
    assert take_all(follower) == [first.name, second.name]
    (tmp_path / "in" / "part_2.csv").write_bytes(second.read_bytes())
    os.utime(first, (5, 5))
    take_all(follower, 3 * SIZE)
    assert list(said := notices(follower)) == ["taken_again part_2.csv"]
    assert "the size and the checksum of part_1.csv" in said["taken_again part_2.csv"]
    with first.open("a") as file:
        file.write("0,1,1,1,1\n")
    second.write_bytes(second.read_bytes().replace(b"21", b"39"))
    take_all(follower, 3 * SIZE)
    follower.end()
    assert sorted(said := notices(follower)) == ["changed part_0.csv", "changed part_1.csv"]
    assert "what is new in it never trains" in said["changed part_0.csv"]
    result = follower.result()
    assert (result.taken, result.taken_again, result.changed) == (3, ("part_2.csv",), ("part_0.csv", "part_1.csv"))
    assert not notices(follower)
    follower.close()


def test_what_is_no_file_is_named_and_passed_over(ranks: Ranks, tmp_path: Path) -> None:
    config = config_of(tmp_path / "in").data
    names = bad_files.make_no_files(tmp_path / "in")
    good = write(tmp_path / "in" / "part_9.csv", 0)
    follower = FolderFollower(config, None, ranks)
    assert take_all(follower) == [good.name]
    said = notices(follower)
    assert sorted(said) == sorted(f"passed_over {name}" for name in names)
    words = ("Too many levels of symbolic links", "a link to nothing", "a folder", "a pipe")
    for name, what in zip(names, words, strict=True):
        assert f"{name}: {what}" in said[f"passed_over {name}"]
    follower.close()


def test_a_file_that_cannot_be_read_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opens = write(tmp_path / "part_0.csv", 0), Path.open

    def refusing(self: Path, *given: Any, **options: Any) -> Any:
        if self == path:  # the superuser, who runs tests, may read all
            raise PermissionError(13, "Permission denied", str(path))
        return opens(self, *given, **options)

    monkeypatch.setattr(Path, "open", refusing)
    found = FollowedSource(config_of(tmp_path).data, []).examine(path, has_begun=False)
    assert "part_0.csv: Permission denied. Change its permissions" in str(found.problem)
