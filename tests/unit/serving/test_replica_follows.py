"""A replica says what keeps it from the newest state, goes on, and starts while bases come and go."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from embershard.distributed.publish.published import (
    DamagedError,
    GoneError,
    MissingDeltaError,
    OtherChainError,
    PublicationError,
)
from embershard.extras.publications import compact, write
from embershard.extras.serving import serving_replica
from embershard.extras.serving.server.prediction_server import Predictor
from embershard.extras.serving.serving_replica import Replica
from tests.unit.distributed import publications
from tests.unit.distributed.publications import Run, chain
from tests.unit.serving.test_replica import serves

pytestmark = pytest.mark.extra


@pytest.fixture(scope="module")
def program() -> bytes:
    return publications.program()


@pytest.fixture
def run(program: bytes, tmp_path: Path) -> Run:
    """With base_0 to delta_2 in "p", the folder of the replica."""
    return chain(tmp_path / "p", 2, program)[0]


def wait_until(is_so: Callable[[], object]) -> None:
    ends = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.001)


@pytest.fixture
def replica(run: Run) -> Iterator[Replica]:
    replica = Replica(run.folder)
    yield replica
    replica.close()


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("can't allocate"), OSError(5, "I/O"), KeyError("k"), DamagedError("d")]
)
@pytest.mark.parametrize("where", ["read_files", "set_weights", "published"])
def test_every_error_is_told_and_counted_and_what_failed_is_taken(replica, run, monkeypatch, error, where):
    real, fails = getattr(serving_replica, where), threading.Event()

    def fail(*given: object) -> object:
        if fails.is_set() and threading.current_thread().name == "replica":
            raise error
        return real(*given)

    monkeypatch.setattr(serving_replica, where, fail)
    fails.set()
    replica.follow(every_seconds=0.001)
    run.delta(replica.have)
    wait_until(lambda: replica.failures_in_row > 1)
    name = "" if isinstance(error, PublicationError) else type(error).__name__  # it is a sentence
    assert f"{run.folder}: delta_3, or a newer base, cannot be taken ({name}" in replica.problem
    assert str(error) in replica.problem
    assert serves(replica, run) or replica.have.seq == 2
    fails.clear()
    wait_until(lambda: not replica.problem)
    assert (replica.have.seq, replica.failures_in_row, replica.failures > 1) == (3, 0, True)
    assert serves(replica, run)


def test_a_change_that_cannot_be_ended_is_not_answered_from(replica, run, monkeypatch):
    def fail(*_: object) -> None:
        raise MemoryError

    run.delta(replica.have)
    with monkeypatch.context() as patch:
        patch.setattr(serving_replica, "set_weights", fail)
        for attempt in (replica.update, replica.update, lambda: replica.state().__enter__()):
            with pytest.raises(MemoryError):
                attempt()
    with replica.state() as (_, have):
        assert have.seq == 3
    assert serves(replica, run)


def other_run(folder: Path, run: Run, program: bytes) -> None:
    """The folder is given to another run."""
    shutil.rmtree(folder)
    chain(folder, 1, program, run_id="r2", seed=7)


def delta_of_other_run(folder: Path, run: Run, program: bytes) -> None:
    chain(folder.parent / "q", 3, program, run_id="r2", seed=7)
    shutil.copytree(folder.parent / "q" / "delta_3", folder / "delta_3")


def base_of_other_run(folder: Path, run: Run, program: bytes) -> None:
    """Above its deltas is a base of another one, of the same number."""
    for path in folder.iterdir():
        shutil.rmtree(path)
    Run(folder, "r2", seed=7).base(2, program)


def other_state(folder: Path, run: Run, program: bytes) -> None:
    """Of this run by its name alone."""
    shutil.rmtree(folder)
    chain(folder, 2, program, seed=7)


def gap(folder: Path, run: Run, program: bytes) -> None:
    for _ in range(2):
        run.delta(write.newest(folder))
    shutil.rmtree(folder / "delta_3")


def damaged_base(folder: Path, run: Run, program: bytes) -> None:
    run.base(5, program)
    (folder / "base_5" / "inputs.json").write_text("{}")


def emptied(folder: Path, run: Run, program: bytes) -> None:
    """As of a file system that is not mounted."""
    for path in folder.iterdir():
        shutil.rmtree(path)


def rolled_back(folder: Path, run: Run, program: bytes) -> None:
    shutil.rmtree(folder / "delta_2")


@pytest.mark.parametrize(
    ("happens", "kind", "said"),
    [
        (
            lambda folder, *_: shutil.rmtree(folder),
            GoneError,
            "No such file or directory; delta_2 (step 20) of run r1 is",
        ),
        (emptied, GoneError, "no publications are there any more; delta_2 (step 20) of run r1 is served"),
        (other_run, OtherChainError, "delta_1: it is of run r2; delta_2 (step 20) of run r1 is served"),
        (delta_of_other_run, OtherChainError, "delta_3: it is of run r2, needed r1"),
        (base_of_other_run, OtherChainError, "base_2: it is of run r2"),
        (other_state, OtherChainError, "delta_2: it is another state of this number"),
        (gap, MissingDeltaError, "delta_4: delta_3 before it is missing"),
        (damaged_base, DamagedError, "base_5/inputs.json: is missing, or its bytes are not those"),
        (rolled_back, MissingDeltaError, "delta_1: it is the newest there, and older: delta_2"),
    ],
)
def test_what_keeps_it_from_the_newest_state_is_said_and_served_is_what_it_has(
    replica, run, program, tmp_path, happens, kind, said
):
    shutil.copytree(run.folder, tmp_path / "before")
    tables = {name: rows.clone() for name, rows in run.tables.items()}
    happens(run.folder, run, program)
    replica.follow(every_seconds=0.001)
    wait_until(lambda: said in replica.problem)
    assert str(run.folder) in replica.problem
    with pytest.raises(kind):
        replica.update()
    assert replica.have.seq == 2
    run.tables = tables
    shutil.rmtree(run.folder, ignore_errors=True)
    shutil.copytree(tmp_path / "before", run.folder)
    wait_until(lambda: not replica.problem)
    assert replica.have.seq == 2


def replaced_before(monkeypatch: pytest.MonkeyPatch, name: str, folder: Path, seqs: list[int]) -> None:
    """Before a function of the replica runs, a base takes the place of the others: each time, the next of `seqs`."""
    real = getattr(serving_replica, name)

    def replaced(*given: object) -> object:
        if seqs:
            compact.make_base(folder, seqs.pop(0))
            write.prune(folder, 1, None)
        return real(*given)

    monkeypatch.setattr(serving_replica, name, replaced)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("name", ["read_publication", "verify", "load"])
def test_a_replica_starts_while_its_base_is_replaced(program, tmp_path, monkeypatch, name, times):
    run, _ = chain(tmp_path / "p", 5, program)
    replaced_before(monkeypatch, name, run.folder, list(range(2, 2 + times)))
    replica = Replica(run.folder)
    assert replica.have.seq == 5
    assert serves(replica, run)


@pytest.mark.parametrize("name", ["read_files", "read_publication", "verify", "load"])
def test_a_replica_follows_while_bases_are_replaced(replica, run, monkeypatch, name):
    have = replica.have
    for _ in range(4):
        have = run.delta(have)
    if name in ("verify", "load"):  # it must take a base
        compact.make_base(run.folder, 4)
        shutil.rmtree(run.folder / "delta_3")
    replaced_before(monkeypatch, name, run.folder, [5, 6])
    assert replica.update() > 0
    assert replica.have.seq == 6
    assert serves(replica, run)


def test_a_folder_that_stays_damaged_ends_a_start_in_a_sentence(run):
    (run.folder / "base_0" / "dense.pt2").write_bytes(b"")
    with pytest.raises(DamagedError, match=r"base_0/dense.pt2: is missing, or its bytes"):
        Replica(run.folder)
    shutil.rmtree(run.folder / "base_0")
    with pytest.raises(DamagedError, match="no base is there"):
        Replica(run.folder)


def test_a_base_that_cannot_be_loaded_is_named(program, tmp_path):
    Run(tmp_path).base(program=b"of another version of torch")
    with pytest.raises(PublicationError, match=r"base_0: cannot be loaded \("):
        Replica(tmp_path)


def test_pauses_grow_to_half_a_minute_and_begin_anew(replica):
    class Clock(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout)
            return len(pauses) == 12

    def update() -> int:
        if len(pauses) != 8:
            raise MemoryError
        return 0

    pauses: list[float | None] = []
    replica._is_over = Clock()
    replica.update = update
    replica.follow(every_seconds=0.5)
    replica._thread.join(60)
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 0.5, 1, 2, 4]
    assert (replica.failures, replica.failures_in_row) == (10, 3)


def test_closing_waits_for_no_pause(replica):
    replica.follow(every_seconds=1e6)
    replica.close()
    assert not replica._thread.is_alive()


def test_the_age_is_that_of_what_is_served(replica, run):
    now = time.time()
    assert 0 <= replica.age_seconds < 600
    run.delta(replica.have)
    os.utime(run.folder / "delta_3" / "manifest.json", (now - 5000, now - 5000))
    replica.update()
    assert 5000 <= replica.age_seconds < 5600
    run.delta(replica.have)
    os.utime(run.folder / "delta_4" / "manifest.json", (now + 5000, now + 5000))
    replica.update()
    assert replica.age_seconds == 0, "another clock is ahead"


def test_health_says_that_what_is_served_is_stale_how_old_it_is_and_why(run):
    predictor = Predictor(run.folder, every_seconds=0.001)
    about = predictor.health
    assert (about["status"], about["step"], about["problem"], about["failures"]) == ("ok", 20, "", 0)
    run.folder.rename(run.folder.with_name("unmounted"))
    wait_until(lambda: predictor.health["failures_in_row"] > 1)
    about = predictor.health
    assert (about["status"], about["step"]) == ("stale", 20)
    assert "No such file or directory" in about["problem"]
    assert about["failures"] >= about["failures_in_row"]
    assert 0 < about["age_seconds"] < 600
    assert predictor.predict([{"user": 1, "item": 2}])["step"] == 20
    predictor.close()
