"""A checkpoint goes from mode to mode, and comes back as it was; `test_resharding.py` has the negative controls."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import mode_moves, resharding
from tests.ranks.mode_moves import SAVED_AT
from tests.ranks.test_resharding import tensors_that_differ
from tests.ranks.workers import RankPool

pytestmark = [pytest.mark.extra, pytest.mark.ranks]


def test_from_mode_to_mode(two_ranks: RankPool, tmp_path: Path) -> None:
    """`python -m tests.ranks.mode_moves` tries every pair, also on 1 and 4 ranks and through stock TorchRec."""
    resharding.write_samples(tmp_path / "samples.parquet")
    two_ranks.run(mode_moves.train, "pooled", "rowwise_adagrad", tmp_path, "first")
    first = newest = tmp_path / "first" / f"step_{SAVED_AT}"
    for mode in ("hot_cold", "rows", "data_parallel", "static", "resident"):
        two_ranks.run(mode_moves.go_on, mode, "rowwise_adagrad", tmp_path, newest, tmp_path / mode)
        newest = tmp_path / mode / first.name
        assert tensors_that_differ(first, newest) == []
    assert mode_moves.move(two_ranks, "pooled", "rowwise_adagrad", tmp_path, newest) == mode_moves.move(
        two_ranks, "pooled", "rowwise_adagrad", tmp_path, first
    )
