"""`embershard data inspect`, `convert` and joins take a file of three times the memory that they are allowed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.covering import matrix

pytestmark = pytest.mark.slow  # files of 200 MB

_ROOM_MIB, _TIMES = 64, 3
_ROW_BYTES = 1 << 10
_BLOCK_ROWS = 1 << 10
#: Runs with little memory beyond what it has after its imports and a first look at a small file; in pieces of 1 MiB,
#: not 4, so that files of 200 MB do.
_CHILD = """
import re, resource, sys, tempfile
from pathlib import Path
import pyarrow.csv
from embershard.commands import cli
from embershard.data.sources.table import containers, whole_columns
containers.raw_blocks.__defaults__ = (1 << 20,)
whole_columns._BATCH_ROWS = 1 << 10
pyarrow.set_cpu_count(1)
pyarrow.set_io_thread_count(1)
with tempfile.TemporaryDirectory() as out:
    assert cli.main(["data", "inspect", "small.csv", "-o", f"{out}/a.toml"]) == 0
    assert cli.main(["data", "convert", "small.csv", "--join", "users.csv", "-o", f"{out}/a.parquet"]) == 0
taken = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
limit = taken + (int(sys.argv[1]) << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
if sys.argv[2] == "whole":
    pyarrow.csv.read_csv("large.csv")
    sys.exit()
sys.exit(cli.main(["data", *sys.argv[2:]]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 1 KiB: 192 MiB of them in large.csv and, with a user each, in many_users.csv; few in the other files."""
    found = tmp_path_factory.mktemp("memory")
    filler = "x" * (_ROW_BYTES - 40)
    rows = [f"{n % 2},u{n:07},{n / 4},{n % 97} {filler}\n" for n in range(_BLOCK_ROWS)]
    (found / "small.csv").write_text("".join(["click,user,price,city\n", *rows[:200]]))
    (found / "users.csv").write_text("user,age\n" + "".join(f"u{n:07},{n % 80}\n" for n in range(_BLOCK_ROWS)))
    with (found / "large.csv").open("w") as file:
        file.write("click,user,price,city\n")
        for _ in range(_ROOM_MIB * _TIMES):
            file.writelines(rows)
    with (found / "many_users.csv").open("w") as file:  # another one in each row
        file.write("user,told\n")
        for block in range(_ROOM_MIB * _TIMES):
            file.writelines(f"u{block * _BLOCK_ROWS + n:07},{n % 97} {filler}\n" for n in range(_BLOCK_ROWS))
    return found


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _CHILD, str(_ROOM_MIB), *words]
    # Arrow's own pool reserves 1 GiB at its start, and malloc one of 64 MiB for each thread
    env = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "words",
    [
        matrix(["inspect", "large.csv", "-o", "large.toml"]),
        matrix(["convert", "large.csv", "--rows", "1024", "-o", "large.parquet"]),
        ["convert", "small.csv", "--join", "many_users.csv", "-o", "joined.parquet"],
    ],
)
def test_files_of_three_times_the_memory_are_taken(folder, words):
    assert (folder / words[-3 if "--join" in words else 1]).stat().st_size > _TIMES * (_ROOM_MIB << 20) * 0.9
    done = run(folder, *words)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (folder / words[-1]).exists()


@pytest.mark.matrix
def test_the_limit_would_be_seen(folder):
    """The negative control: a reader that takes the file whole."""
    done = run(folder, "whole")
    assert done.returncode != 0
    assert "Out of memory" in done.stderr or "MemoryError" in done.stderr, done.stderr
