"""A save that fails is one error, and leaves earlier checkpoints as they were: full disks, read-only folders."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from embershard.distributed import (
    CheckpointConfig,
    Ranks,
    check_disk,
    complete_checkpoints,
    load_tensors,
    prune,
    save_checkpoint,
    set_aside,
    verify_checkpoint,
)
from embershard.distributed.checkpoint import folder, save
from embershard.distributed.checkpoint.best import BEST, BestEvaluation
from embershard.errors import CheckpointError, ConfigError, FailedSaveError
from embershard.launch.run_dir import lock_run_dir
from tests.unit.distributed import checkpoints


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """Files cannot grow beyond it, as on a full disk."""
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
        signal.signal(signal.SIGXFSZ, handler)


def save_large(place: Path, step: int, ranks: Ranks, num_bytes: int) -> Path:
    tensors = {"w": torch.full((num_bytes // 4,), float(step))}
    return save_checkpoint(place, step, tensors, {}, ranks, keep_last=9, run_id="run")


def assert_only_step_1(place: Path, ranks: Ranks) -> None:
    assert [path.name for path in place.glob("step_*")] == ["step_1"]
    assert verify_checkpoint(place / "step_1", ranks) is not None
    loaded = {"w": torch.zeros(50_000)}
    load_tensors(place / "step_1", loaded)
    assert torch.equal(loaded["w"], torch.ones(50_000))


def test_a_full_disk(tiny_disk, ranks):
    save_large(tiny_disk, 1, ranks, 200_000)
    with pytest.raises(FailedSaveError, match=r"^step 2 could not .*\(rank 0: No space left on device\)[^\n]*$"):
        save_large(tiny_disk, 2, ranks, 400_000)
    assert_only_step_1(tiny_disk, ranks)
    save_large(tiny_disk, 2, ranks, 200_000)  # what failed left no space used


def test_a_file_that_cannot_grow(tmp_path, ranks):
    save_large(tmp_path, 1, ranks, 200_000)
    with file_limit(100_000), pytest.raises(FailedSaveError, match=r"\(rank 0: File too large\)"):
        save_large(tmp_path, 2, ranks, 200_000)
    assert_only_step_1(tmp_path, ranks)


@pytest.mark.parametrize("failing", ["mkdir", "scalars.json", "manifest.json", "sync", "rename"])
def test_each_later_step_may_fail(tmp_path, ranks, monkeypatch, failing):
    save_large(tmp_path, 1, ranks, 200_000)
    error = OSError(errno.EDQUOT, "Disk quota exceeded")

    def fails(*_: object) -> None:
        raise error

    if failing == "mkdir":
        monkeypatch.setattr(save, "_make_empty", fails)
    elif failing == "sync":
        monkeypatch.setattr(save, "sync_folder", fails)
    elif failing == "rename":
        monkeypatch.setattr(save.os, "rename", fails)
    else:
        write = save._write_synced
        monkeypatch.setattr(save, "_write_synced", lambda p, text: fails() if p.name == failing else write(p, text))
    with pytest.raises(FailedSaveError, match=r"step 2 could not be saved .*Disk quota exceeded"):
        save_large(tmp_path, 2, ranks, 200_000)
    monkeypatch.undo()
    assert_only_step_1(tmp_path, ranks)


def test_files_and_folders_are_synced_before_the_name_and_old_ones_go_last(tmp_path, ranks, monkeypatch):
    checkpoints.save(tmp_path, 1, ranks)
    events: list[str] = []
    fsync, rename, rmtree = os.fsync, os.rename, folder.shutil.rmtree

    def synced(handle: int) -> None:
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        fsync(handle)

    def renamed(old: Path, new: Path) -> None:
        events.append(f"rename {Path(old).name}")
        rename(old, new)

    def removed(path: Path, **options: bool) -> None:
        events.extend(["remove"] if path.exists() else [])
        rmtree(path, **options)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(folder.shutil, "rmtree", removed)
    checkpoints.save(tmp_path, 2, ranks, keep_last=1)
    named = events.index("rename step_2.tmp")
    before = {"__0_0.distcp", ".metadata.tmp", "scalars.json", "manifest.json", "step_2.tmp"}
    assert before <= {event.removeprefix("sync ") for event in events[:named]}
    assert events[named + 1] == f"sync {tmp_path.name}"
    assert events[named + 2 :] == ["rename step_1", "remove"]


def test_pruning_keeps_what_is_newer(tmp_path):
    for step in (1, 2, 3, 999):
        (tmp_path / f"step_{step}").mkdir()
    prune(tmp_path, step=3, keep_last=2)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_2", "step_3", "step_999"]


def test_the_best_one_is_not_pruned(tmp_path):
    for step in (1, 2, 3, 4):
        (tmp_path / f"step_{step}").mkdir()
    BestEvaluation(2, "auc", 0.75).write(tmp_path)
    assert prune(tmp_path, step=4, keep_last=1) == ["step_1", "step_3"]
    (tmp_path / BEST).write_text("[]")
    assert prune(tmp_path, step=4, keep_last=1) == ["step_2"]


def test_a_checkpoint_elsewhere_loses_its_link_only(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step_1").symlink_to("elsewhere")
    (tmp_path / "step_2").mkdir()
    assert prune(tmp_path, step=2, keep_last=1) == ["step_1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "step_2"]


def test_old_checkpoints_that_stay_do_not_end_the_run(tmp_path, ranks, monkeypatch):
    checkpoints.save(tmp_path, 1, ranks, keep_last=1)
    monkeypatch.setattr(folder.shutil, "rmtree", _not_permitted)
    with pytest.warns(RuntimeWarning, match=r"step 2 was saved, but .* removed: .*: Not permitted\. Change its perm"):
        checkpoints.save(tmp_path, 2, ranks, keep_last=1)
    assert "step_2" in {path.name for path in complete_checkpoints(tmp_path)}


def _not_permitted(path: Path, ignore_errors: bool = False) -> None:
    if not ignore_errors:
        raise PermissionError(13, "Not permitted", str(path))


def test_setting_aside_twice_keeps_both(tmp_path):
    for _ in range(2):
        (tmp_path / "step_5").mkdir()
        set_aside(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_5.aside", "step_5.aside2"]
    assert complete_checkpoints(tmp_path) == []


def test_space_for_all_kept_and_one_more(tmp_path, ranks, monkeypatch):
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=5_000_000_000))
    check_disk(tmp_path, 1_600_000_000, num_saves=9, keep_last=2, ranks=ranks)
    check_disk(tmp_path, 5_000_000_000, num_saves=1, keep_last=2, ranks=ranks)
    with pytest.raises(
        CheckpointError, match=r"need 4\.75 GiB more, and 4\.66 GiB are free \(3 checkpoints of 1\.58 G"
    ):
        check_disk(tmp_path, 1_700_000_000, num_saves=9, keep_last=2, ranks=ranks)
    (tmp_path / "step_1").mkdir()
    with (tmp_path / "step_1" / "x").open("wb") as file:
        file.truncate(1_700_000_000)  # it will go
    check_disk(tmp_path, 1_700_000_000, num_saves=9, keep_last=2, ranks=ranks)


def test_space_beside_mapped_rows(tmp_path, ranks, monkeypatch):
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=5_000_000_000))
    check_disk(tmp_path, 1_000_000_000, num_saves=9, keep_last=2, ranks=ranks, mapped_bytes=2_000_000_000)
    with pytest.raises(
        CheckpointError, match=r"and 953\.67 MiB are free beside 3\.73 GiB in cache\.host_dir and publish"
    ):
        check_disk(tmp_path, 1_000_000_000, num_saves=9, keep_last=2, ranks=ranks, mapped_bytes=4_000_000_000)


def test_a_folder_that_cannot_be_written(tmp_path, ranks):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"rank 0 cannot write checkpoints: .*: Not a directory. A part of the"):
        check_disk(tmp_path / "file" / "checkpoints", 1, 1, 1, ranks)


def test_a_disk_that_is_full(tmp_path, ranks):
    (tmp_path / ".write_test_0").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"rank 0 cannot write checkpoints: .*The disk is full: free some space"):
        check_disk(tmp_path, 1, 1, 1, ranks)


def test_a_run_folder_on_a_read_only_disk(tiny_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(ConfigError, match=r"run cannot be written \(Read-only file system\)"):
        lock_run_dir(tiny_disk / "run")


def test_a_read_only_disk(tiny_disk, ranks):
    save_large(tiny_disk, 1, ranks, 200_000)
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(CheckpointError, match=r"cannot write checkpoints: .*: Read-only file system"):
        check_disk(tiny_disk, 1, 1, 1, ranks)
    with pytest.raises(FailedSaveError, match=r"step 2 could not be saved .*\(Read-only file system\)"):
        save_large(tiny_disk, 2, ranks, 1000)
    assert_only_step_1(tiny_disk, ranks)


@pytest.mark.parametrize("every", [None, 1, 3, 7, 10, 11])
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("steps", [0, 7, 10])
def test_the_number_of_saves(every, at_end, steps):
    saved = {step for step in range(1, steps + 1) if every and step % every == 0} | (
        {steps} if at_end and steps else set()
    )
    assert CheckpointConfig(every, at_end).num_saves(steps) == len(saved)


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="on_failed_save: got 'go', needed"):
        CheckpointConfig(on_failed_save="go")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"no effect without checkpoint\.every_steps"):
        CheckpointConfig(on_failed_save="continue")
