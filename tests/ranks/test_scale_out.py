"""A study of scaling, whole: `embershard sweep` on a file with `[scale_out]`; and two nodes on this machine."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.ranks import commands

pytestmark = [pytest.mark.ranks, pytest.mark.extra, pytest.mark.slow]

FILE = """
config = "{config}"
time_limit_seconds = 300
[set]
data.synthetic.scale = 0.0005
data.synthetic.num_samples = 4000
profile.samples = 1000
cache.ratio = 0.2
train.batch_size = 32
train.max_steps = 8
train.eval_every = "none"
checkpoint.at_end = false
checkpoint.every_steps = "none"
plan = "--types table_wise"
[grid]
ranks = [{ranks}]
{grid}
[scale_out]
topology = "cpu"
"""


def study(project_dir: Path, folder: Path, ranks: str, grid: str = "", more: str = "") -> list[dict[str, str]]:
    """Run it; return the rows of scaling.csv."""
    config = project_dir / "examples" / "quickstart.toml"
    (folder / "study.toml").write_text(FILE.format(config=config, ranks=ranks, grid=grid) + more)
    words = ["sweep", str(folder / "study.toml"), "--out", str(folder / "out")]
    done = commands.run(words, folder, timeout=500.0)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    with (folder / "out" / "scaling.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.smoke
def test_a_study_has_measured_predicted_traced_and_simulated_points(project_dir: Path, tmp_path: Path) -> None:
    rows = study(project_dir, tmp_path, "1, 2", "train.seed = [1, 2]", "simulate_to = 4\nprofile_steps = [4, 6]\n")
    assert [(row["source"], row["ranks"]) for row in rows] == [
        ("measured", "1"),
        ("measured", "2"),
        ("simulated", "1"),
        ("simulated", "2"),
        ("simulated", "4"),
    ]
    for row in rows[:2]:
        assert float(row["predicted_step_ms"]) > 0
        assert row["cache_bytes"] == row["predicted_cache_bytes"]
        assert float(row["hit_rate"]) == pytest.approx(float(row["predicted_hit_rate"]), abs=0.02)
        assert 100 << 20 < float(row["process_bytes_before"]) < float(row["predicted_process_bytes"]), "torch was there"
        assert float(row["predicted_process_bytes"]) < float(row["peak_process_bytes"]), "threads, batches, torch's own"
        assert float(row["parts_ms.forward"]) > 0
    for kind in ("embeddings", "gradients"):
        measured = float(rows[1][f"sent_bytes.{kind}"])
        assert measured == pytest.approx(float(rows[1][f"predicted_sent_bytes.{kind}"]), rel=0.02)
        assert measured > 0
    assert all(float(row["low"]) < float(row["samples_per_second"]) < float(row["high"]) for row in rows[2:])
    for name in ("efficiency", "predicted_efficiency"):
        assert (float(rows[0][name]), float(rows[1][name]) > 0) == (1.0, True)
    assert float(rows[1]["efficiency_low"]) < float(rows[1]["efficiency"]) < float(rows[1]["efficiency_high"])
    assert (tmp_path / "out" / "scaling.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "out" / "scaling.md").read_text()
    assert "Weak scaling: the same samples per rank" in text
    titles = ("Efficiency, measured", "Memory of a rank", "Parts of a step, measured, ms", "Sent by a rank in a step")
    assert all(f"\n## {title}" in text for title in titles)
    assert f"| {float(rows[1]['efficiency']):.1%} |" in text
    pytest.importorskip("plotly", reason="Plotly is not installed (the extra [report])")
    page = (tmp_path / "out" / "report.html").read_text()
    assert all(title in page for title in ("Measured, predicted, simulated", *titles))


def may_have_nodes() -> bool:
    if os.geteuid() or any(shutil.which(name) is None for name in ("ip", "tc", "unshare", "nsenter")):
        return False
    script = "ip link add here0 type bridge && ip link add one0 type veth peer name two0 && tc qdisc add dev one0"
    words = ["unshare", "--net", "sh", "-c", f"{script} root tbf rate 1mbit burst 9kb limit 9kb"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may_have_nodes(), reason="no network namespaces (they need root, iproute2 and util-linux)")
def test_nodes_change_no_bit_and_their_link_the_speed(project_dir: Path, tmp_path: Path) -> None:
    rows = study(project_dir, tmp_path, "2", grid='nodes = [1, 2]\nlink = ["none"]')
    assert len(rows) == 2
    with (tmp_path / "out" / "results.csv").open() as file:
        runs = list(csv.DictReader(file))
    assert {run["nodes"] for run in runs} == {"1", "2"}
    assert len({run["result.loss"] for run in runs}) == 1
    rows = study(project_dir, tmp_path, "2", grid='nodes = [2]\nlink = ["8mbit"]')
    (slow,) = (row for row in rows if "8mbit" in row["configuration"])
    sent = sum(float(slow[f"sent_bytes.{kind}"]) for kind in ("ids", "embeddings", "gradients", "dense_all_reduce"))
    by_link = 1e3 * 8 * sent / 8e6  # at least: a frame has more than its payload
    assert float(slow["step_ms"]) > 0.9 * by_link  # a bucket may be full at the start of a step
    assert float(slow["predicted_step_ms"]) > by_link
