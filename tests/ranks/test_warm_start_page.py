"""The commands of docs/warm_start.md, in their order, on two ranks, over generated samples."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

from embershard.distributed.checkpoint.boxes import CheckpointSaved
from embershard.distributed.publish.exported import ExportSaved
from embershard.settings.decoding import to_toml
from tests.ranks import commands
from tests.unit.test_docs import blocks
from tests.unit.training.warm.models import features, run_of, write_samples

pytestmark = [pytest.mark.extra, pytest.mark.ranks]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "warm_start.md"
_OWN = re.compile(r"(yesterday|today)\.toml|runs/\w+|exported")


def in_folder(word: str, folder: Path) -> str:
    return str(folder / word) if _OWN.fullmatch(word) else word


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    """What each command said, by its line on the page."""
    samples = write_samples(folder / "samples.parquet")
    (folder / "yesterday.toml").write_text(to_toml(run_of(samples, steps=8)))
    today = features(item=None, product=40, day=7)
    (folder / "today.toml").write_text(to_toml(run_of(samples, today, steps=4)))
    found = {}
    for line in filter(None, "\n".join(blocks(PAGE.read_text(), "bash")).splitlines()):
        words = [in_folder(word, folder) for word in shlex.split(line)]
        found[line] = commands.run(words[1:], folder)
        assert found[line].returncode == 0, found[line].stderr
    return found


def said(done: dict[str, subprocess.CompletedProcess[str]], *words: str) -> str:
    (line,) = (line for line in done if all(word in line for word in words))
    return done[line].stdout


def test_the_page_s_commands_run(done):
    assert len(done) == 5


def test_a_dry_run_shows_what_would_be_taken(done):
    shown = said(done, "--dry-run")
    lines = [line.removeprefix("# ").rstrip() for line in shown.splitlines() if line.startswith("#")]
    (example,) = (block for block in blocks(PAGE.read_text(), "text") if block.startswith("From"))
    first, *rest = example.strip().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("From "))
    assert lines[start].endswith(first.partition("yesterday/")[2])
    assert lines[start + 1 :] == rest


def test_a_run_says_what_it_took(done):
    shown = said(done, "--run-dir runs/today")
    assert "1 table renamed, 1 table new" in shown
    assert "was t_item" in shown
    assert "--from" in shown.partition("Next, the same run")[2]


def test_a_run_from_an_export_freezes_a_table(done, folder):
    shown = said(done, "--from exported")
    assert "an export of step 8" in shown
    assert "no states of optimizers" in shown
    exported, trained = ExportSaved(folder / "exported"), CheckpointSaved(folder / "runs/frozen/checkpoints/step_4")
    names = {name.split(".")[-2]: name for name in trained.sizes() if name.startswith("model.")}
    before = {name: exported.whole(f"model.tables.embedding_bags.{name}.weight") for name in ("t_item", "t_user")}
    assert torch.equal(trained.whole(names["t_product"]), before["t_item"])
    assert not torch.equal(trained.whole(names["t_user"]), before["t_user"])
