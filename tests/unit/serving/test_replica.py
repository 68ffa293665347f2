"""A replica takes what follows, whole, and refuses everything else by name without a change."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from embershard.distributed.publish.published import (
    AlreadyAppliedError,
    DamagedError,
    MissingDeltaError,
    OtherChainError,
    OutOfOrderError,
    PublicationError,
    StaleLifeError,
)
from embershard.extras.publications import compact, write
from embershard.extras.serving.serving_model import table_names, weights_of
from embershard.extras.serving.serving_replica import Replica
from tests.unit.distributed import publications
from tests.unit.distributed.publications import INPUTS, Run, chain

pytestmark = pytest.mark.extra


@pytest.fixture(scope="module")
def program() -> bytes:
    return publications.program()


def serves(replica: Replica, run: Run) -> bool:
    """Whether the replica has the run's weights, bit for bit."""
    with replica.state() as (model, _):
        tables = dict(zip(table_names(INPUTS), model.tables, strict=True))
        same = all(torch.equal(tables[name].stored, rows) for name, rows in run.tables.items())
        dense = weights_of(model.dense)
        return same and all(torch.equal(dense[name], weight) for name, weight in run.dense.items())


@pytest.mark.smoke
def test_it_takes_deltas_and_starts_again_where_it_was(program, tmp_path):
    run, found = chain(tmp_path, 1, program)
    replica = Replica(tmp_path)
    assert (replica.have.name, serves(replica, run)) == ("delta_1", True)
    for _ in range(3):
        found.append(run.delta(found[-1]))
    assert not serves(replica, run)
    assert replica.update() == 3
    assert serves(replica, run)
    assert replica.update() == 0
    assert serves(Replica(tmp_path), run)
    answer = replica(torch.ones(2, 1), [torch.tensor([3, 4])] * 2, [torch.tensor([0, 1, 2])] * 2)
    user, item = (run.tables[name][[3, 4]] for name in ("t_user", "t_item"))
    expected = torch.cat([user, item], 1) @ run.dense["weight"].T + run.dense["bias"]
    assert torch.equal(answer, expected.squeeze(-1))


def refused(replica: Replica, path: Path, kind: type[Exception]) -> str:
    """Apply a delta that must be refused, and nothing may change; return what was said."""
    with replica.state() as (model, have):
        before = [model.tables[0].stored.clone(), model.tables[1].stored.clone()]
        dense = {name: weight.clone() for name, weight in weights_of(model.dense).items()}
    with pytest.raises(kind) as error:
        replica.apply(path)
    assert error.type is kind
    with replica.state() as (model, now):
        assert now == have
        assert all(torch.equal(table.stored, rows) for table, rows in zip(model.tables, before, strict=True))
        assert all(torch.equal(weight, dense[name]) for name, weight in weights_of(model.dense).items())
    return str(error.value)


@pytest.fixture
def replica(program, tmp_path) -> Replica:
    """At delta 1 of 3."""
    _, _found = chain(tmp_path / "whole", 3, program)
    shutil.copytree(tmp_path / "whole", tmp_path / "p")
    for name in ("delta_2", "delta_3"):
        shutil.rmtree(tmp_path / "p" / name)
    return Replica(tmp_path / "p")


def put(replica: Replica, tmp_path: Path, name: str, source: str | Path | None = None) -> Path:
    """Put a delta into the replica's folder."""
    shutil.copytree(tmp_path / "whole" / (source or name), replica.folder / name)
    return replica.folder / name


def test_missing_and_reordered(replica, tmp_path):
    third = put(replica, tmp_path, "delta_3")
    assert "delta_2 is missing" in refused(replica, third, MissingDeltaError)
    second = put(replica, tmp_path, "delta_2")
    assert "delta_2 comes first" in refused(replica, third, OutOfOrderError)
    replica.apply(second)
    replica.apply(third)


def test_repeated(replica, tmp_path):
    second = put(replica, tmp_path, "delta_2")
    replica.apply(second)
    refused(replica, second, AlreadyAppliedError)
    refused(replica, replica.folder / "delta_1", AlreadyAppliedError)


def test_swapped(replica, tmp_path):
    """The folder of one has the name of the other."""
    refused(replica, put(replica, tmp_path, "delta_2", "delta_3"), DamagedError)


def test_foreign(replica, tmp_path, program):
    _other, _found = chain(tmp_path / "other", 2, program, run_id="r2", seed=1)
    shutil.copytree(tmp_path / "other" / "delta_2", replica.folder / "delta_2")
    assert "it is of run r2" in refused(replica, replica.folder / "delta_2", OtherChainError)
    _twin, _ = chain(tmp_path / "twin", 2, program, seed=1)  # of this run by its name alone
    shutil.rmtree(replica.folder / "delta_2")
    shutil.copytree(tmp_path / "twin" / "delta_2", replica.folder / "delta_2")
    assert "it follows" in refused(replica, replica.folder / "delta_2", OtherChainError)
    refused(replica, replica.folder / "base_0", OtherChainError)


def test_stale(replica, tmp_path):
    """The old life goes on writing while a new one publishes."""
    old = Run(replica.folder, life=0)
    new = Run(replica.folder, life=1)
    replica.apply(replica.folder / new.delta(replica.have).name)
    refused(replica, replica.folder / old.delta(replica.have).name, StaleLifeError)


def test_damaged(replica, tmp_path):
    path = put(replica, tmp_path, "delta_2")
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        refused(replica, path, DamagedError)
        file.unlink()
        refused(replica, path, DamagedError)
        file.write_bytes(whole)
    replica.apply(path)


@pytest.mark.parametrize("wrong", ["key", "table", "weight"])
def test_what_does_not_fit_is_refused_though_its_checksums_are_right(replica, tmp_path, wrong):
    run = Run(replica.folder)
    touched = run.train()
    if wrong == "key":
        touched[0].keys[-1] = 20
    if wrong == "table":
        touched[0] = replace(touched[0], table="t_none")
    if wrong == "weight":
        run.dense = {"weight": torch.zeros(1, 9), "bias": torch.zeros(1)}
    delta = run.delta(replica.have, touched)
    with pytest.raises(PublicationError):
        replica.apply(replica.folder / delta.name)
    assert replica.have.seq == 1


def test_a_newer_base_takes_the_place_of_deltas_that_are_gone_or_damaged(replica, tmp_path, program):
    run, found = chain(tmp_path / "q", 2, program)
    replica = Replica(tmp_path / "q")
    for _ in range(2):
        found.append(run.delta(found[-1]))
    path = tmp_path / "q" / "delta_3" / "rows_0.safetensors"
    whole = path.read_bytes()
    path.write_bytes(b"x" + whole[1:])
    with pytest.raises(DamagedError):
        replica.update()
    path.write_bytes(whole)
    compact.make_base(tmp_path / "q")
    path.write_bytes(b"x" + whole[1:])
    assert replica.update() == 1
    assert (replica.have.name, serves(replica, run)) == ("base_4", True)
    found.append(run.delta(found[-1]))  # its parent is delta_4, whose state the base has
    assert replica.update() == 1
    assert serves(replica, run)
    write.prune(tmp_path / "q", 1, None)
    assert serves(Replica(tmp_path / "q"), run)


def test_a_new_base_of_the_trainer_is_taken(program, tmp_path):
    run, _found = chain(tmp_path, 2, program)
    replica = Replica(tmp_path)
    run.train()
    run.life = 1
    base = run.base(3, program)
    assert replica.update() == 1
    assert serves(replica, run)
    run.delta(base)
    assert replica.update() == 1
    assert serves(replica, run)


def test_bases_of_other_runs_and_of_older_lives_are_refused(program, tmp_path):
    _run, _found = chain(tmp_path, 1, program, life=3)
    replica = Replica(tmp_path)
    Run(tmp_path, life=2).base(5, program)
    with pytest.raises(StaleLifeError):
        replica.update()
    shutil.rmtree(tmp_path / "base_5")
    Run(tmp_path, "r2", life=4).base(5, program)
    with pytest.raises(OtherChainError):
        replica.update()


def test_answers_are_those_of_one_state(program, tmp_path):
    """A thread asks without a pause while deltas come: each answer is what its publication's weights give."""
    run, found = chain(tmp_path, 0, program)
    replica = Replica(tmp_path)
    inputs = torch.ones(20, 1), [torch.arange(20)] * 2, [torch.arange(21)] * 2

    def answer(model: torch.nn.Module) -> bytes:
        with torch.no_grad():
            return model(*inputs).numpy().tobytes()

    expected, seen, is_over = {}, [], threading.Event()
    with replica.state() as (model, have):
        expected[have.seq] = answer(model)

    def ask() -> None:
        while not is_over.is_set():
            with replica.state() as (model, have):
                seen.append((have.seq, answer(model)))

    thread = threading.Thread(target=ask)
    thread.start()
    for _ in range(20):
        found.append(run.delta(found[-1]))
        replica.update()
        with replica.state() as (model, have):
            expected[have.seq] = answer(model)
    is_over.set()
    thread.join()
    assert len(set(expected.values())) == 21
    assert seen
    assert all(expected[seq] == outputs for seq, outputs in seen)


def test_following_says_what_it_cannot_take_and_goes_on(replica, tmp_path):
    told = threading.Event()
    update = replica.update

    def watched() -> int:
        try:
            return update()
        finally:
            told.set()

    replica.update = watched
    path = put(replica, tmp_path, "delta_2")
    file = path / "dense.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    replica.follow(every_seconds=0.01)
    while not replica.problem:
        assert told.wait(60)
    assert "delta_2" in replica.problem
    file.write_bytes(whole)
    while replica.have.seq < 2:
        told.clear()
        assert told.wait(60)
    replica.close()
