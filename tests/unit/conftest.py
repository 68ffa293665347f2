"""Fixtures of several rooms' tests."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from embershard.distributed import Ranks, process_group


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """A gloo group of this process, for the tests of a file."""
    with process_group("cpu") as found:
        yield found


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB; skipped where the test may not mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield place
    subprocess.run(["umount", str(place)], check=True)
