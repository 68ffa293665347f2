"""Process pools, one per world size, kept for the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.workers import RankPool


def _pool(world_size: int, local_world_size: int | None = None) -> Iterator[RankPool]:
    pool = RankPool(world_size, local_world_size)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankPool]:
    """A gloo group of one process."""
    yield from _pool(1)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """A gloo group of two processes."""
    yield from _pool(2)


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankPool]:
    """A gloo group of four processes, as two nodes of two; not kept for longer than a module."""
    yield from _pool(4, local_world_size=2)
