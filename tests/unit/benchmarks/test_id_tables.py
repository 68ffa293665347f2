"""The benchmarks of tables of ids, at toy size."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import id_quality, id_tables


@pytest.mark.slow
def test_maps_of_all_sizes_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--parts", "map", "--map-rows", "2400", "24000", "--batch-size", "8"]
    monkeypatch.setattr("sys.argv", ["id_tables", *arguments, "--output", str(tmp_path / "found.json")])
    id_tables.main()
    found = json.loads((tmp_path / "found.json").read_text())["maps"]
    assert [size["rows"] for size in found] == [2400, 24000]
    assert all(0.8 < size["live"] / size["rows"] <= 0.9 and 28 <= size["bytes_per_row"] < 29 for size in found)
    assert all(len(size["resolve_ns_per_distinct_id"]) == 3 for size in found)


def test_real_clicks_are_read_as_they_are(tmp_path: Path) -> None:
    line = "\t".join(["1", "5", "", *["2"] * 11, "62770d79", "", *["ffffffff"] * 24])
    path = tmp_path / "clicks.txt.gz"
    path.write_bytes(gzip.compress(f"{line}\n".encode() * 5))
    clicks = id_quality.real(str(path))
    assert clicks.ids[0, :3].tolist() == [0x62770D79 + 1, 0, 2**32]
    assert clicks.dense[0, :2].tolist() == [np.log1p(np.float32(5)), 0]
    assert (len(clicks.labels), clicks.first_scored) == (5, 4)


def test_tables_of_ids_take_no_more_bytes_than_hashed_ones() -> None:
    clicks = id_quality.drifting(4000, seed=0)
    sizes = {}
    for variant in id_quality.VARIANTS:
        ids, rows, rules = id_quality.tables(clicks, variant, 0.3, dim=16)
        sizes[variant] = id_quality.num_bytes(rows, rules, 16)
        assert bool(rules) == variant.startswith("ids")
        if variant in ("hash", "row_per_id"):
            assert (ids < rows).all()
            assert (id_quality.shared_lookups(clicks, ids) > 0.5) == (variant == "hash")
    assert 0.97 * sizes["hash"] < sizes["ids_admit_after_2"] < sizes["hash"] < 0.4 * sizes["row_per_id"]
    assert 0.97 * sizes["hash"] < sizes["ids"] < sizes["hash"]
