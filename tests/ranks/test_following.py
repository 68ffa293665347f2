"""Following a folder on several ranks: one stream, which goes on with any number of ranks."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from embershard.data.time_config import TimeConfig
from embershard.settings.decoding import to_toml
from tests.ranks import commands, following, time_order
from tests.ranks.test_time_order import samples
from tests.ranks.time_order import EVERY
from tests.ranks.workers import RankPool
from tests.unit.test_docs import blocks
from tests.unit.test_docs import commands as commands_in

pytestmark = [pytest.mark.extra, pytest.mark.ranks]


def test_one_stream_on_one_rank_and_two_and_runs_go_on(one_rank: RankPool, two_ranks: RankPool, tmp_path: Path) -> None:
    files = sorted(time_order.write_clicks(tmp_path / "clicks").iterdir())
    ((in_turn, losses),) = one_rank.run(following.run_in_turn, tmp_path / "clicks", 5)
    ((alone, same),) = one_rank.run(following.run, files, tmp_path / "one", tmp_path / "alone", 5)
    assert alone.samples == in_turn.samples
    assert same == losses, "bit for bit"
    assert alone.late == in_turn.late > 3
    assert sum(each["samples"] for *_, each in alone.windows) == sum(each["samples"] for *_, each in in_turn.windows)
    pairs = two_ranks.run(following.run, files[:2], tmp_path / "two", tmp_path / "both", 5)
    both = [trained for trained, _ in pairs]
    assert samples(both) == alone.samples[: len(both[0].samples)]
    assert len(both[0].samples) == 400 // time_order.GLOBAL_BATCH
    assert both[0].windows == both[1].windows
    journal = tmp_path / "both" / "files.jsonl"
    assert [json.loads(line)["rows"] for line in journal.read_text().splitlines()] == [200, 200]
    saved = 2 * EVERY
    given = files[2:], tmp_path / "two", tmp_path / "both", 0, saved
    ((rest, _),) = one_rank.run(following.run, *given)
    assert rest.samples == alone.samples[saved:], "by one rank, with a file that came meanwhile"
    assert [place[:2] for place in rest.windows] == [place[:2] for place in alone.windows if place[0] >= saved]
    assert len(journal.read_text().splitlines()) == 3
    again = two_ranks.run(following.run, [], tmp_path / "two", tmp_path / "both", 5, saved)
    assert samples([trained for trained, _ in again]) == alone.samples[saved:]


def test_the_commands_of_the_page(tmp_path: Path, project_dir: Path) -> None:
    """Train to the end of what is there; then a file comes, and a resume trains it."""
    files = sorted(time_order.write_clicks(tmp_path / "clicks").iterdir())
    later = files[2].rename(tmp_path / files[2].name)
    config = time_order.make_config(tmp_path, 5, "together")
    config = replace(config, data=replace(config.data, path=None, time=TimeConfig()))
    (tmp_path / "clicks.toml").write_text(to_toml(config))
    page = (project_dir / "docs" / "data.md").read_text(encoding="utf-8")
    (command,) = commands_in(blocks(page.partition("### Following a folder")[2].partition("## ")[0], "bash")[0])
    for name in ("clicks.toml", "runs/clicks", "=clicks/"):
        command = command.replace(name, f"={tmp_path}/clicks" if name[0] == "=" else f"{tmp_path}/{name}")
    _, *words = shlex.split(command.replace("idle_seconds=60", "idle_seconds=1"))
    done = commands.run([*words, "--nproc", "2"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Follows" in done.stdout
    result = tmp_path / "runs" / "clicks" / "result.json"
    assert json.loads(result.read_text())["steps"] == 20
    later.rename(files[2])
    done = commands.run([*words, "--nproc", "1", "--resume", "--set", "checkpoint.at_end=true"], tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())
    assert (found["steps"], found["measured_steps"]) == (30, 16), "from the checkpoint of step 14 on"
    windows = found["windows"]
    assert sum(window["samples"] for window in windows) == found["held_out"]["samples"] == found["eval_samples"]
    assert [window["start"] for window in windows] == sorted(window["start"] for window in windows)
    assert found["look_ahead"]["lookahead_min"] == 0
