"""A bit that changes in the file of one rank: all ranks end, with its message, and a resume gives the right rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from embershard.cache.file import file_rows
from embershard.distributed import complete_checkpoints
from tests.covering import matrix
from tests.disks import FlippingIo
from tests.ranks import commands
from tests.ranks.commands import Process, forked
from tests.ranks.test_planned_files import CONFIG
from tests.ranks.test_resharding import tensors_that_differ

pytestmark = pytest.mark.ranks


class _FlippingIoOfOneRank(FlippingIo):
    def __init__(self) -> None:
        super().__init__(works=260 if os.environ.get("RANK") == "1" else 1 << 60)


def train(arguments: list[str], output: Path) -> None:
    """Be the launcher of two ranks, of which number 1 has such a disk."""
    file_rows.PageIo = _FlippingIoOfOneRank  # type: ignore[misc]
    commands._command(arguments, output, None, dict(os.environ))


@pytest.mark.matrix
@pytest.mark.parametrize("goes_on", [False, matrix(True)])
def test_a_bit_that_changes_on_one_rank_ends_all_with_its_message(tmp_path: Path, goes_on: bool) -> None:
    """That a run with such a disk goes on, killed ones do, too: tests/faults/test_file_kills.py."""
    text = CONFIG.replace("HERE", str(tmp_path / "rows")).replace("HOST_BYTES", "130000")
    (tmp_path / "run.toml").write_text(text.replace("at_end = false", "every_steps = 10\nkeep_last = 9"))
    arguments = ["train", "--config", str(tmp_path / "run.toml"), "--run-dir"]
    output, code = tmp_path / "output.txt", None
    launcher = Process(forked().Process(target=train, args=([*arguments, str(tmp_path / "run")], output)))
    try:
        code = launcher.wait(600)
    finally:
        launcher.kill()
    said = " ".join(output.read_text().split())
    assert code == 1, said
    assert said.count("[rank1]: CacheError: page ") == 1, said
    assert "of table 't_" in said
    assert "Traceback" not in said
    assert not list((tmp_path / "rows").iterdir())

    def trained(name: str, *more: str) -> Any:
        done = commands.run([*arguments, str(tmp_path / name), *more], tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return complete_checkpoints(tmp_path / name / "checkpoints")[-1]

    assert complete_checkpoints(tmp_path / "run" / "checkpoints")
    if goes_on:
        assert not tensors_that_differ(trained("run", "--resume"), trained("whole"))
