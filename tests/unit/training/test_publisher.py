"""The publisher of a run whose rows change by chance: failed writes, other runs, runs that start again."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from embershard.distributed import PublishConfig, Ranks
from embershard.distributed.changed_rows import BehindRows
from embershard.distributed.publish.published import published, read_publication
from embershard.errors import ConfigError
from embershard.extras.publications import part as publisher_module
from embershard.extras.publications import write
from embershard.extras.publications.sources import ComparedTable, PublishedPool
from embershard.extras.serving.serving_replica import Replica
from embershard.sharding.torchrec import flush, host_rows_changed
from embershard.sharding.torchrec.inspection import cached_embeddings
from embershard.training.config import TrainConfig
from embershard.training.trainer import Trainer
from tests.covering import keep
from tests.faults import publications
from tests.faults.publications import Life
from tests.small_runs import small_run

pytestmark = pytest.mark.extra


@pytest.fixture(scope="module")
def layers() -> bytes:
    return publications.program()


@pytest.fixture(autouse=True)
def _own_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "cached_embeddings", None)  # each life sets its own


def differs(folder: Path, life: Life) -> str:
    return publications._differs(Replica(folder / "published"), life.state())


def test_rows_of_a_delta_that_failed_are_in_the_next(tmp_path, layers, monkeypatch):
    life = Life(tmp_path, None, False, 1, layers)
    writes = write._write_tensors
    failing = [True]

    def fail(path: Path, tensors: object) -> object:
        if failing[0]:
            raise OSError(28, "No space left on device", str(path))
        return writes(path, tensors)

    monkeypatch.setattr(write, "_write_tensors", fail)
    life._train()
    life.publisher.cut(2)
    problems = [report.problem for report in life.publisher.end(2)]
    assert "delta_1 could not be written" in problems[-1]
    assert "No space left" in problems[-1]
    assert differs(tmp_path, life), "the base alone"
    failing[0] = False
    life._train()
    life.publisher.cut(4)
    assert [report.name for report in life.publisher.end(4)] == ["delta_1"]
    assert not differs(tmp_path, life)


def test_the_delay_counts_from_the_last_publication_that_succeeded(tmp_path, layers, monkeypatch):
    now, failing, writes = [100.0], [False], write._write_tensors

    def fail(*given: object) -> object:
        if failing[0]:
            raise OSError(28, "No space left on device")
        return writes(*given)

    monkeypatch.setattr(publisher_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(write, "_write_tensors", fail)
    life = Life(tmp_path, None, False, 1, layers)
    delays = []
    for step, failing[0] in ((1, False), (2, True), (3, False)):
        now[0] += 10
        life._train()
        life.publisher.cut(step)
        delays += [report.delay_seconds for report in life.publisher.end(step) if report.name != "base_0"]
    assert delays == [10, 0, 20]


def test_a_state_is_published_once(tmp_path, layers):
    life = Life(tmp_path, None, False, 1, layers)
    life.publisher.before_save(0)
    assert life.publisher.newest["seq"] == 0  # the base has it
    life._train()
    life.publisher.cut(2)
    ready = life.publisher.before_save(2)
    ready()
    assert life.publisher.newest == {"seq": 1, "token": read_publication(tmp_path / "published" / "delta_1").token}
    list(life.publisher.end(2))


def test_publications_by_the_clock(tmp_path, layers, monkeypatch):
    life = Life(tmp_path, None, False, 1, layers)
    life.publisher._config = PublishConfig("x", every_seconds=10.0)
    now = [life.publisher._cut_at]
    monkeypatch.setattr(publisher_module.time, "monotonic", lambda: now[0])
    due = []
    for step in range(1, 31):
        now[0] += 1
        if life.publisher.is_due(step):
            life.publisher.cut(step)
            due.append(step)
    list(life.publisher.end(30))
    assert due == [10, 20, 30]


def test_the_folder_of_another_run_is_refused(tmp_path, layers):
    Life(tmp_path, None, False, 1, layers).run()
    with pytest.raises(ConfigError, match="publications of another run"):
        Life(tmp_path, None, False, 2, layers)
    (tmp_path / "publishes.json").unlink()
    with pytest.raises(ConfigError, match="publications of another run"):
        Life(tmp_path, None, True, 2, layers)


def test_of_two_runs_that_begin_in_one_folder_the_second_is_refused(tmp_path, layers):
    """While the first writes its base: what it has written so far stays."""
    folder = tmp_path / "published"
    (folder / f"base_0{write.PARTIAL}").mkdir(parents=True)
    lock = "file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX)"
    holds = f"import fcntl, sys; {lock}; print(flush=True); input()"
    words = [sys.executable, "-c", holds, str(folder / ".lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(ConfigError, match=r"is in use by another run, .* Give each run a folder of its own"):
            Life(tmp_path, None, False, 1, layers)
        assert [path.name for path in folder.glob("base_0*")] == [f"base_0{write.PARTIAL}"]
        other.kill()
    Life(tmp_path, None, False, 1, layers)
    assert [path.name for path in folder.glob("base_0*")] == ["base_0"]


def test_a_run_whose_checkpoints_are_gone_goes_on_in_its_folder(tmp_path, layers):
    first = Life(tmp_path, None, False, 1, layers)
    first.run()
    replica = Replica(tmp_path / "published")
    shutil.rmtree(tmp_path / "checkpoints")
    second = Life(tmp_path, None, True, 2, layers)
    second.run()
    assert second.run_id == first.run_id
    replica.update()
    assert not publications._differs(replica, second.state())
    assert replica.have.life == 1


def test_settings_that_were_changed_lead_to_a_base(tmp_path, layers):
    Life(tmp_path, None, False, 1, layers).run()
    before = len(published(tmp_path / "published", "base"))
    life = Life.__new__(Life)
    resume = publisher_module.Publisher.resume

    def changed(self: publisher_module.Publisher, token: str | None, is_changed: bool) -> None:
        resume(self, token, is_changed=True)

    publisher_module.Publisher.resume = changed
    try:
        life.__init__(tmp_path, tmp_path / "checkpoints" / "step_10", False, 2, layers)
    finally:
        publisher_module.Publisher.resume = resume
    (_, path) = published(tmp_path / "published", "base")[-1]
    assert len(published(tmp_path / "published", "base")) == before + 1
    assert read_publication(path).state == ""
    assert not differs(tmp_path, life)


@pytest.mark.parametrize("how", keep(["of a table"], ["of a table", "of all tables", "by torch"]))
def test_rows_that_a_program_writes_are_published(ranks: Ranks, how: str):
    trainer = Trainer(small_run(train=TrainConfig(batch_size=4, max_steps=1, device="cpu")), ranks)
    pools = list(cached_embeddings(trainer.model))
    pool, sources = pools[0], [PublishedPool(each) for each in pools]
    flush(trainer.model)
    assert not any(len(part.keys) for source in sources for part in source.take())
    shard = pool.shards[-1]
    if how == "by torch":
        with torch.no_grad():
            pool.host.weights[shard.first_key + 2] = 7.0
    else:
        pool.host.weights.data[shard.first_key + 2] = 7.0
        given = (shard.table, torch.tensor([shard.first_row + 2])) if how == "of a table" else ()
        host_rows_changed(trainer.model, *given)
    found = next(part for part in sources[0].take() if part.table == shard.table)
    assert found.keys.tolist() == ([2] if how == "of a table" else list(range(shard.num_rows)))
    assert bool((found.rows[found.keys.tolist().index(2)] == 7.0).all())
    trainer.close()


def test_a_table_outside_of_caches_has_the_rows_that_changed():
    rows = torch.zeros(6, 2)
    table = ComparedTable("t", [(10, 4, rows)])
    rows[[1, 3]] = torch.tensor([[0.0, -0.0], [0.0, float("nan")]])
    (found,) = table.take()
    assert (found.keys.tolist(), found.first_column) == ([11, 13], 4)  # by their bits
    assert table.take()[0].keys.tolist() == []
    table.touch("t", BehindRows(torch.tensor([9, 10, 15, 16])))
    table.touch("other", BehindRows(torch.tensor([12])))
    assert table.take()[0].keys.tolist() == [10, 15]
    rows += 1
    table.forget()
    assert table.take()[0].keys.tolist() == []


class FullDisk:
    """Has no space at one operation of a file whose name has `part`, or from that one on; it counts them."""

    def __init__(self, part: str) -> None:
        self.part, self.count, self.at, self.stays_full = part, -1, -1, False
        sys.addaudithook(self._watch)
        self.operations: list[str] = []

    def begin(self, at: int, *, stays_full: bool = False) -> None:
        self.count, self.at, self.stays_full, self.operations = 0, at, stays_full, []

    def _watch(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.count < 0 or event not in ("open", "os.rename", "os.mkdir", "fsync"):
            return
        is_written = event != "open" or (isinstance(arguments[2], int) and arguments[2] & os.O_WRONLY)
        if not is_written or self.part not in str(arguments[0]):
            return
        self.count += 1
        self.operations.append(event)
        if self.count > self.at and (self.stays_full or self.count == self.at + 1):
            raise OSError(errno.ENOSPC, "No space left on device", str(arguments[0]))

    def fsync(self, handle: int) -> None:
        self._watch("fsync", (os.readlink(f"/proc/self/fd/{handle}"),))


@pytest.fixture
def full_disk(tmp_path, monkeypatch):
    disk = FullDisk(f"{tmp_path.name}/")
    monkeypatch.setattr(os, "fsync", disk.fsync)
    yield disk
    disk.count = -1


def told(life: Life, step: int) -> list[str]:
    """The problems that publishing a step tells."""
    life._train()
    life.step = step
    life.publisher.cut(step)
    life.publisher.wait()
    return [report.problem for report in life.publisher.reports() if report.problem]


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_operation_costs_a_delta_and_no_rows(tmp_path, layers, full_disk):
    count = 1 << 30
    for at in range(1 << 30):
        if at > count:
            break
        root = tmp_path / str(at)
        life = Life(root, None, False, 1, layers)
        list(life.publisher.reports())
        full_disk.begin(at)
        problems = told(life, 2)
        count, full_disk.count = full_disk.count, -1
        is_there = (root / "published" / "delta_1").exists()
        assert bool(problems) == bool(life.publisher.failure) != is_there, at
        assert not life.publisher.failure or "No space left on device" in problems[0]
        assert not list((root / "published").glob("*.partial"))
        assert told(life, 4) == []
        assert life.publisher.failure == ""
        assert life.publisher.published.step == 4
        assert not differs(root, life), at
    assert count >= 8
    assert {*full_disk.operations} == {"open", "os.rename", "os.mkdir", "fsync"}


@pytest.mark.parametrize("at", range(0, 10, 2))
def test_what_a_full_disk_left_out_at_the_end_is_told_and_published_by_a_resume(tmp_path, layers, full_disk, at):
    life = Life(tmp_path, None, False, 1, layers)
    told(life, 2)
    full_disk.part = "/published/"
    full_disk.begin(at, stays_full=True)
    assert told(life, 4) or (at >= 8 and not life.publisher.failure)
    list(life.publisher.end(4))
    ready = life.publisher.before_save(4)
    life._prepare(tmp_path / "checkpoints", life.publisher.newest, ready).write(None)
    list(life.publisher.end(4))
    assert "No space left on device" in life.publisher.failure
    assert (life.publisher.published.name, life.publisher.published.step) == ("delta_1", 2)
    full_disk.count = -1
    again = Life(tmp_path, tmp_path / "checkpoints" / "step_4", False, 2, layers)
    [report] = [report for report in again.publisher.reports() if report.problem]
    assert "could not be written, as on a full disk, or was removed: a new base was written" in report.problem
    assert "cannot be read" not in report.problem
    assert again.publisher.published.step == 4
    assert not differs(tmp_path, again)
