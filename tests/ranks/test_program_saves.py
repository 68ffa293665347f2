"""`save_program` and `load_program`: bits of rows in memory, wherever rows are when a program saves, and where it goes
on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import program_saves
from tests.ranks.program_saves import HALF, case_of, loaded, loaded_by_torch, saved, saved_by_torch
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks


@pytest.fixture(params=[1, 2], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest) -> RankPool:
    return request.getfixturevalue("one_rank" if request.param == 1 else "two_ranks")


def assert_same(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    assert sorted(found[1]) == sorted(expected[1])
    assert [name for name in expected[1] if not torch.equal(found[1][name], expected[1][name])] == []


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad", "sgd"])
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
    for found, expected in zip(ranks.run(loaded_by_torch, case, str(tmp_path), path), whole, strict=True):
        assert_same(found, (expected[0][HALF:], expected[1]))


def test_what_torch_saved_of_rows_in_memory_goes_on_in_a_file(ranks: RankPool, tmp_path: Path) -> None:
    whole = ranks.run(saved_by_torch, case_of(), str(tmp_path))
    for found, expected in zip(
        ranks.run(loaded, case_of(), "file", str(tmp_path), str(tmp_path / "of_torch")), whole, strict=True
    ):
        assert_same(found[:2], (expected[0][HALF:], expected[1]))
        assert found[2] == {}
