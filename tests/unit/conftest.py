"""Fixtures of several rooms' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from embershard.distributed import Ranks, process_group


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """A gloo group of this process, for the tests of a file."""
    with process_group("cpu") as found:
        yield found
