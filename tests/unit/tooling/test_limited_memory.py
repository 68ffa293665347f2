"""The control group that tests and benchmarks limit programs with."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.limited_memory import MemoryGroup, NoMemoryGroupError, limited_memory

_LIMIT_BYTES = 64 << 20
#: Takes so many MiB at once, then writes and reads a file of so many.
_CHILD = """
import sys, pathlib
taken, of_file = (int(word) << 20 for word in sys.argv[1:3])
memory = bytearray(taken)
memory[::4096] = b"x" * len(memory[::4096])
path = pathlib.Path(sys.argv[3])
with path.open("wb") as file:
    for _ in range(of_file >> 20):
        file.write(bytes(1 << 20))
print(len(memory) + path.stat().st_size)
"""


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    try:
        with limited_memory(_LIMIT_BYTES) as found:
            yield found
    except NoMemoryGroupError as error:
        pytest.skip(str(error))


def run(group: MemoryGroup, path: Path, taken_mib: int, of_file_mib: int = 0) -> int:
    words = [sys.executable, "-c", _CHILD, str(taken_mib), str(of_file_mib), str(path / "file")]
    done = group.run(words)
    if done.returncode == 0:
        assert int(done.stdout) == (taken_mib + of_file_mib) << 20, done.stderr
    return done.returncode


def test_a_program_below_the_limit_ends_well_and_its_peak_is_told(group: MemoryGroup, tmp_path: Path) -> None:
    assert run(group, tmp_path, taken_mib=30) == 0
    assert 30 << 20 < group.peak_bytes < _LIMIT_BYTES


@pytest.mark.slow
def test_a_program_above_the_limit_is_ended(group: MemoryGroup, tmp_path: Path) -> None:
    assert run(group, tmp_path, taken_mib=90) == -9
    assert _LIMIT_BYTES * 0.9 < group.peak_bytes <= _LIMIT_BYTES


def test_pages_of_files_count_and_are_taken_away(group: MemoryGroup, tmp_path: Path) -> None:
    assert run(group, tmp_path, taken_mib=0, of_file_mib=90) == 0
    assert group.peak_bytes > _LIMIT_BYTES * 0.9


def test_the_group_is_gone_afterwards_and_who_entered_it_is_out() -> None:
    try:
        with limited_memory(1 << 30) as found:
            found.enter()
            assert str(os.getpid()) in (found.folder / "cgroup.procs").read_text().split()
    except NoMemoryGroupError as error:
        pytest.skip(str(error))
    assert not found.folder.exists()


def made(root: Path, groups: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "where"),
    [
        ("0::/a/b", {"a/cgroup.subtree_control": "cpu memory", "a/b/cgroup.subtree_control": ""}, "a"),
        ("0::/a/b", {"a/cgroup.subtree_control": "memory", "a/b/cgroup.subtree_control": "memory"}, "a/b"),
        (
            "4:memory:/c\n0::/a",
            {"memory/memory.limit_in_bytes": "9", "memory/c/memory.limit_in_bytes": "9"},
            "memory/c",
        ),
        ("4:cpu,memory:/the/hosts/path", {"memory/memory.limit_in_bytes": "9"}, "memory"),
    ],
)
def test_the_group_is_below_ones_own_where_it_can_be(
    tmp_path: Path, groups: str, files: dict[str, str], where: str
) -> None:
    mount = "sys/fs/cgroup"
    root = made(tmp_path, groups, {f"{mount}/{name}": text for name, text in files.items()})
    with pytest.raises(OSError), limited_memory(9 << 20, root) as found:  # plain folders are no groups
        assert found.folder.parent == root / mount / where


def test_a_machine_without_a_memory_controller_says_so(tmp_path: Path) -> None:
    root = made(tmp_path, "0::/a", {"sys/fs/cgroup/a/cgroup.subtree_control": "cpu pids"})
    with pytest.raises(NoMemoryGroupError, match="neither version 2"), limited_memory(1 << 20, root):
        pass
