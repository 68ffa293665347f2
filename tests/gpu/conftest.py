"""Ranks on the first GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.ranks.workers import RankPool

# For the processes that are started here. By default cuBLAS may give other bits when several streams are busy.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Kernels are compiled, and libraries of gigabytes loaded, before a process's first answer.
_TIMEOUT_SECONDS = 400.0


@pytest.fixture(scope="session")
def gpu_rank() -> Iterator[RankPool]:
    """A group of one process: NCCL for what is on the GPU, gloo for the rest."""
    pool = RankPool(1, backend="cpu:gloo,cuda:nccl", timeout_seconds=_TIMEOUT_SECONDS)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_gpu_ranks() -> Iterator[RankPool]:
    """A group of two processes that share the GPU, as two nodes of one rank each. NCCL refuses that, so gloo exchanges
    what is on the GPU, too."""
    pool = RankPool(2, local_world_size=1, timeout_seconds=_TIMEOUT_SECONDS)
    yield pool
    pool.close()
