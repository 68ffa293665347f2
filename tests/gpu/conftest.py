"""One rank on the first GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.workers import RankPool


@pytest.fixture(scope="session")
def gpu_rank() -> Iterator[RankPool]:
    """A group of one process: NCCL for what is on the GPU, gloo for the rest."""
    pool = RankPool(1, backend="cpu:gloo,cuda:nccl")
    yield pool
    pool.close()
