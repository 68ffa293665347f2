"""Output whose reader has ended; and warnings on the screen."""

from __future__ import annotations

import io
import os
import pty
import sys
import warnings
from typing import Any, TextIO

import pytest

from embershard.cache import CacheGrowthWarning
from embershard.launch import launcher
from embershard.launch.screen import plain_console, say, silence_libraries


@pytest.fixture
def unread() -> TextIO:
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w")


def test_a_command_goes_on_when_nobody_reads_its_output(unread, monkeypatch):
    monkeypatch.setattr(sys, "stdout", unread)
    console = plain_console()
    say(console, "one", "two")  # by rich's default, SystemExit
    assert console.quiet
    unread.close()  # what Python does at its end; it would fail with what could not be written


def test_the_launcher_keeps_its_exit_code_when_nobody_reads_its_messages(unread, monkeypatch):
    monkeypatch.setattr(sys, "stderr", unread)
    launcher._tell("stopped before the first step. Nothing was trained.")
    with pytest.raises(BrokenPipeError):
        unread.close()


def test_a_command_goes_on_when_its_terminal_was_closed(monkeypatch):
    """The system's error is that of a failing disk."""
    ours, terminal = pty.openpty()
    os.close(ours)
    lost = os.fdopen(terminal, "w")
    monkeypatch.setattr(sys, "stdout", lost)
    console = plain_console()
    say(console, "one", "two")
    assert console.quiet
    lost.close()


def test_an_error_of_a_disk_is_none_of_a_terminal(tmp_path):
    class Failing(io.TextIOWrapper):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    with Failing((tmp_path / "log").open("wb")) as file, pytest.raises(OSError, match="error: 'standard output'"):
        say(plain_console(file=file), "one")


def test_output_on_a_full_disk_is_named():
    full = open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(OSError, match="No space left on device: 'standard output'"):
        say(plain_console(file=full), "one")


def shown(text: str, **options: Any) -> list[str]:
    screen = io.StringIO()
    say(plain_console(file=screen, width=40, color_system=None, **options), text)
    return screen.getvalue().splitlines()


def test_a_terminal_breaks_lines_between_words():
    """By itself it breaks them anywhere."""
    text = (
        "Tables and caches are placed by /a/long/path/of/a/plan/that/has/no/blank.json. Steps wait for the embeddings."
    )
    lines = shown(text, force_terminal=True)
    assert " ".join(lines) == text
    assert [line for line in lines if len(line) > 40] == ["/a/long/path/of/a/plan/that/has/no/blank.json."]
    assert shown(text, force_terminal=False) == [text], "a file has it as it is"


@pytest.mark.parametrize(
    "said", ["Not ended. Go on with:    {}", "Train with it now, with all of its ranks:  {}", "    {}"]
)
def test_commands_are_not_broken(said: str):
    command = "embershard train --config a/file/of/settings.toml --set train.batch_size=4096 --resume"
    lines = shown(said.format(command), force_terminal=True)
    assert lines[-1] == f"    {command}"
    assert all(len(line) <= 40 for line in lines[:-1])


def test_a_warning_of_our_own_is_one_line(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    with warnings.catch_warnings():
        silence_libraries()
    place = (str(__file__), 7, "a line of the code")
    assert warnings.formatwarning("it grows", CacheGrowthWarning, *place) == "embershard: warning: it grows\n"
    assert "a line of the code" in warnings.formatwarning("others", UserWarning, *place)
