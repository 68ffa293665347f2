"""Output whose reader has ended; and warnings on the screen."""

from __future__ import annotations

import io
import os
import pty
import sys
import warnings
from typing import TextIO

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


def test_a_warning_of_our_own_is_one_line(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    with warnings.catch_warnings():
        silence_libraries()
    place = (str(__file__), 7, "a line of the code")
    assert warnings.formatwarning("it grows", CacheGrowthWarning, *place) == "embershard: warning: it grows\n"
    assert "a line of the code" in warnings.formatwarning("others", UserWarning, *place)
