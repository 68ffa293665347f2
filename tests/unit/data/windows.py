"""Windows of generated sessions, as a user makes them."""

from __future__ import annotations

from pathlib import Path

from embershard.launch import cli


def make_windows(folder: Path, *, users: int, items: int, history: int) -> Path:
    """Generate a log of events in a folder, and make windows of it: their folder."""
    log, windows = folder / "log.csv", folder / "windows"
    assert cli.main(["data", "sessions", "-o", str(log), "--users", str(users), "--items", str(items)]) == 0
    assert cli.main(["data", "events", str(log), "-o", str(windows), "--history", str(history)]) == 0
    return windows
