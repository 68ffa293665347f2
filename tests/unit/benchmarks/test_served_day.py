"""A day of clicks that is trained and served by the hour, at toy size."""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks import served_day

pytestmark = pytest.mark.extra

CLICKS = "".join(f"{n % 2}\t{n}" + "\t" * 12 + "\t1a" * 25 + "\t\n" for n in range(50))


def test_rows_are_cut_in_their_order(tmp_path: Path):
    (tmp_path / "clicks.txt.gz").write_bytes(gzip.compress(CLICKS.encode()))
    rows = served_day.cut_into_hours(tmp_path / "clicks.txt.gz", tmp_path / "hours", 4)
    hours = [pq.read_table(path) for path in sorted((tmp_path / "hours").iterdir())]
    assert [hour.num_rows for hour in hours] == [13, 12, 13, 12]
    assert [number for hour in hours for number in hour["I1"].to_pylist()] == list(range(50))
    assert all(len({time // 3600 for time in hour["time"].to_pylist()}) == 1 for hour in hours)
    assert rows[0] == {
        **dict.fromkeys(served_day._NUMBERS),
        "I1": 0.0,
        **dict.fromkeys(served_day._IDS, 0x1A),
        "C26": None,
    }


@pytest.mark.slow
@pytest.mark.matrix
def test_every_answer_of_real_clicks_is_right(criteo_sample: Path, tmp_path: Path):
    (sample,) = criteo_sample.glob("day_*.gz")
    lines = gzip.decompress(sample.read_bytes()).splitlines(keepends=True)[:1200]
    (tmp_path / "clicks.txt").write_bytes(b"".join(lines))
    options = argparse.Namespace(path=tmp_path / "clicks.txt", hours=6, batch_size=16, every=4)
    found = served_day.run(options, tmp_path)
    assert [hour["samples"] for hour in found["hours"]] == [200] * 5
    assert (found["errors"], found["wrong"]) == (0, 0)
    assert found["states"] > 1
    assert found["publications"] == 1 + 75 // 4 + 1
