"""Windows of generated sessions, as a user makes them."""

from __future__ import annotations

from pathlib import Path

from embershard.commands import cli
from embershard.settings.decoding import read_toml


def make_windows(folder: Path, *, users: int, items: int, history: int) -> Path:
    """Generate a log of events in a folder, and make windows of it: their folder."""
    log, windows = folder / "log.csv", folder / "windows"
    assert cli.main(["data", "sessions", "-o", str(log), "--users", str(users), "--items", str(items)]) == 0
    assert cli.main(["data", "events", str(log), "-o", str(windows), "--history", str(history)]) == 0
    return windows


def hstu_overrides(windows: Path) -> list[str]:
    """Settings that make a small HSTU, with times, of the DIN in the settings of windows."""
    parquet = read_toml(windows / "run.toml")["data"]["parquet"]
    return [
        "model.arch=hstu",
        'model.history=["hist_item", "hist_category", "hist_behaviour"]',
        "model.hstu.max_events=20",
        "model.hstu.head_dim=4",
        "model.hstu.window=5",
        'model.hstu.times=["time", "hist_time"]',
        f"data.parquet.sparse={[*parquet['sparse'], 'time', 'hist_time']}",
        f"data.parquet.num_rows={[*parquet['num_rows'], 1 << 32, 1 << 32]}",
    ]
