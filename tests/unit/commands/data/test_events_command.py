"""`embershard data events` says what it made, and its settings say how to train on it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from embershard.commands import cli

pytestmark = [pytest.mark.extra, pytest.mark.smoke]


def test_the_settings_name_commands_that_are_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [f"{user},{item},1,pv,{1_700_000_000_000 + 1000 * item}\n" for user in range(3) for item in range(4)]
    Path("log.csv").write_text("".join(lines))
    assert cli.main(["data", "events", "log.csv", "-o", "my windows"]) == 0
    assert "The log's times are in milliseconds." in capsys.readouterr().out
    comments = "".join(re.findall("^#.*\n", Path("my windows", "run.toml").read_text(), re.M))
    assert re.findall("`embershard (.*?)`", comments) == ["data events", "settings"]
    (train,) = re.findall("^#   embershard (.*)", comments, re.M)
    assert cli.main([*shlex.split(train), "--dry-run"]) == 0
