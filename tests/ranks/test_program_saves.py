"""`save_program` and `load_program`: bits of rows in memory, wherever rows are when a program saves, and where it goes
on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.covering import keep, matrix
from tests.ranks.program_saves import (
    HALF,
    case_of,
    counted,
    crashed_saves,
    loaded,
    loaded_by_folder,
    loaded_by_torch,
    refused,
    saved,
    saved_at_once,
    saved_by_torch,
    saved_unread,
)
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

HOSTS = ("file", "memory")


@pytest.fixture(params=[matrix(1), 2], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest) -> RankPool:
    return request.getfixturevalue("one_rank" if request.param == 1 else "two_ranks")


def assert_same(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    assert sorted(found[1]) == sorted(expected[1])
    assert [name for name in expected[1] if not torch.equal(found[1][name], expected[1][name])] == []


@pytest.mark.parametrize("optimizer", keep(["rowwise_adagrad"], ["rowwise_adagrad", "adagrad", "sgd"]))
def test_a_program_goes_on_with_every_bit(ranks: RankPool, tmp_path: Path, optimizer: str) -> None:
    case, path = case_of(optimizer=optimizer), str(tmp_path / f"step_{HALF}")
    whole = ranks.run(saved, case, "file", str(tmp_path))
    (tmp_path / "memory").mkdir()
    in_memory = ranks.run(saved, case, "memory", str(tmp_path / "memory"))
    for found, expected in zip(whole, in_memory, strict=True):
        assert_same(found, expected)
        assert min(found[2].values()) > 20, "a home of rows was not tried"
        assert found[3] > 300
    for host, before in (("file", 0), ("memory", 0), ("file", 9)):
        for found, expected in zip(ranks.run(loaded, case, host, str(tmp_path), path, before), whole, strict=True):
            losses, rows, scalars, _ = found
            assert_same((losses, rows), (expected[0][HALF:], expected[1]))
            assert scalars == {"seen": HALF * 6, "step": HALF}
    if optimizer != "sgd":  # torch cannot find an empty dict of states again
        for found, expected in zip(ranks.run(loaded_by_torch, case, str(tmp_path), path), whole, strict=True):
            assert_same(found, (expected[0][HALF:], expected[1]))


@pytest.mark.parametrize("ranks", [1, matrix(2)], indirect=True, ids="{} ranks".format)
def test_a_deep_window_changes_no_bit(ranks: RankPool, tmp_path: Path) -> None:
    """Nor does a save with such batches ahead, from which a program goes on. Fewer rows are read."""
    (tmp_path / "memory").mkdir()
    (tmp_path / "near").mkdir()
    deep, in_memory = (
        ranks.run(saved, case_of(), host, str(tmp_path / folder), 24)
        for host, folder in (("file", "."), ("memory", "memory"))
    )
    few = ranks.run(saved, case_of(), "file", str(tmp_path / "near"))
    path = str(tmp_path / f"step_{HALF}")
    resumed = ranks.run(loaded, case_of(), "file", str(tmp_path), path)
    for found, expected, of_few, (losses, rows, *_) in zip(deep, in_memory, few, resumed, strict=True):
        assert_same(found, expected)
        assert_same((losses, rows), (expected[0][HALF:], expected[1]))
        assert found[3] > 300
        assert 100 < found[4].rows_read < of_few[4].rows_read


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, matrix(2)], indirect=True, ids="{} ranks".format)
def test_what_torch_saved_of_rows_in_memory_goes_on_in_a_file(ranks: RankPool, tmp_path: Path) -> None:
    whole = ranks.run(saved_by_torch, case_of(), str(tmp_path))
    for found, expected in zip(
        ranks.run(loaded, case_of(), "file", str(tmp_path), str(tmp_path / "of_torch")), whole, strict=True
    ):
        assert_same(found[:2], (expected[0][HALF:], expected[1]))
        assert found[2] == {}


@pytest.mark.matrix
def test_a_save_without_what_is_in_the_file_differs(one_rank: RankPool, tmp_path: Path) -> None:
    """The control: rows of the file are saved as those that were never written are."""
    ((losses, rows),) = one_rank.run(saved_unread, case_of(), str(tmp_path))
    ((found, loaded_rows, _, _),) = one_rank.run(
        loaded, case_of(), "file", str(tmp_path), str(tmp_path / f"step_{HALF}")
    )
    assert found != losses[HALF:]
    assert sum(not torch.equal(loaded_rows[name], rows[name]) for name in rows) >= 4


def tables_in(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tables, from the shards of their weights by name and offsets."""
    found: dict[str, dict[tuple[int, int], Tensor]] = {}
    for key, rows in parts.items():
        kind, name, *offsets = key.split("/")
        if kind == "weight" and offsets:
            first, column = offsets[0].strip("()").split(",")
            found.setdefault(name, {})[int(first), int(column)] = rows
    whole = {}
    for name, shards in found.items():
        sizes = [(first + len(rows), column + rows.shape[1]) for (first, column), rows in shards.items()]
        whole[name] = torch.full([max(numbers) for numbers in zip(*sizes, strict=True)], torch.nan)
        for (first, column), rows in shards.items():
            whole[name][first : first + len(rows), column : column + rows.shape[1]] = rows
    return whole


def test_rows_of_other_ranks_and_plans_are_read(one_rank: RankPool, two_ranks: RankPool, tmp_path: Path) -> None:
    """What one rank reads, with other shards, into a file and into memory, is what two ranks had at the save."""
    of_ranks = two_ranks.run(saved_at_once, case_of(), str(tmp_path))
    path, case = str(tmp_path / f"step_{HALF}"), case_of("table_wise")
    ((*_, in_file),), ((*_, in_memory),) = (one_rank.run(loaded, case, host, str(tmp_path), path) for host in HOSTS)
    assert sorted(in_file) == sorted(in_memory)
    assert [name for name in in_memory if not torch.equal(in_file[name], in_memory[name])] == []
    before, after = tables_in({name: rows for part in of_ranks for name, rows in part.items()}), tables_in(in_file)
    assert len(before) == 4
    assert sorted(before) == sorted(after)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_a_folder_is_loaded_by_its_newest_sound_step(two_ranks: RankPool, tmp_path: Path) -> None:
    """By the argument that it was saved with; what is of another future is put aside."""
    first, second = two_ranks.run(loaded_by_folder, str(tmp_path))
    newest, chosen, sound, saved_again, skipped, aside, nothing, gone = first
    assert [newest, chosen, sound, saved_again] == ["6", "2", "4", "5"]
    assert "step_4 is loaded" in skipped
    assert "step_6" in skipped
    assert "step_6.aside" in aside
    assert "no complete checkpoint" in nothing
    assert "step_9" in gone
    assert second == [*first[:4], *first[-2:]]


@pytest.mark.matrix
def test_a_dead_save_leaves_a_sound_step(one_rank: RankPool, tmp_path: Path) -> None:
    ((operations, problems),) = one_rank.run(crashed_saves, tmp_path)
    assert problems == []
    assert operations > 10


def test_what_cannot_be_says_what_to_call(two_ranks: RankPool, tmp_path: Path) -> None:
    for found in two_ranks.run(refused, str(tmp_path)):
        assert "embershard.save_program" in found["state dict"]
        assert found["dense only"].startswith("ConfigError")
        assert "CombinedOptimizer" in found["dense only"]
        assert "exists already" in found["again"]
        assert "init_state()" in found["no states"]
        assert found["damaged"].startswith("InvalidCheckpointError")


def test_a_program_sees_what_the_file_tier_did(one_rank: RankPool, tmp_path: Path) -> None:
    ((before, own, of_pools),) = one_rank.run(counted, case_of(), "file", str(tmp_path))
    assert (before.rows_read, before.rows_written) == (0, 0)
    assert min(own.rows_read, own.pages_read, own.rows_written, own.pages_written) > 60
    assert own == of_pools
    ((*_, in_memory),) = one_rank.run(counted, case_of(), "memory", str(tmp_path))
    assert in_memory.rows_written == 0
