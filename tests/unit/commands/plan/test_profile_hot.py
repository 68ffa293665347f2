"""`embershard profile --hot`: which rows and samples are hot, and how often both kinds are clicked."""

from __future__ import annotations

import numpy as np
import pytest

from embershard.commands.profile.command import main
from embershard.data import CriteoConfig, DataConfig, open_source
from embershard.data.order.stream import SampleReader
from embershard.errors import ConfigError
from embershard.extras.hot_cold.clicks import ClickCounts, hot_sentences
from embershard.frequency import FrequencyProfile, HotRows

pytestmark = pytest.mark.extra

ROWS = HotRows({"user": np.arange(3), "item": np.arange(2)}, {"user": 3, "item": 9}, threshold=4, num_bytes=2_000_000)


@pytest.mark.slow
def test_the_real_sample(criteo_sample, tmp_path, capsys):
    given = [str(criteo_sample), "-o", str(tmp_path / "p.npz"), "--set", "data.criteo.num_rows=20000"]
    assert main([*given, "--hot", "1MB"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    profile = FrequencyProfile.load(tmp_path / "p.npz")
    row_bytes = 16 * 4 + 4  # dim 16, row-wise Adagrad
    # All rows with at least so many lookups that they fit into 1 MB; one lookup less, and they do not.
    counts = {table: profile.counts[table].numpy() for table in profile.tables}
    needed = {t: sum(int((of >= t).sum()) for of in counts.values()) for t in range(1, 2000)}
    threshold = min(t for t, rows in needed.items() if rows * row_bytes <= 1_000_000)
    assert needed[threshold - 1] * row_bytes > 1_000_000
    config = DataConfig(kind="criteo", path=str(criteo_sample), criteo=CriteoConfig(num_rows=20_000))
    reader = SampleReader(open_source(config), "train", config)
    block = reader.read(0, [(0, 9000)])
    ids = np.stack(block.values)
    of_tables = list(counts.values())
    is_hot = np.stack([of[row] >= threshold for of, row in zip(of_tables, ids, strict=True)]).all(axis=0)
    rates = [float(block.labels[kind].mean()) for kind in (is_hot, ~is_hot)]
    errors = [np.sqrt(p * (1 - p) / kind.sum()) for p, kind in zip(rates, (is_hot, ~is_hot), strict=True)]
    assert f"Hot rows: {needed[threshold]:,} of 520,000 are looked up at least {threshold} times" in said
    assert f"Hot samples: {is_hot.mean():.2%} of 9,000 look up hot rows only." in said
    hot, cold = (f"{p:.2%} +- {error:.2%}" for p, error in zip(rates, errors, strict=True))
    assert f"Click rate: {hot} of hot samples, {cold} of cold ones (with standard errors)" in said


def test_a_difference_is_told_from_chance():
    clear = hot_sentences(ROWS, ClickCounts(10_000, 100), ClickCounts(10_000, 300))
    assert clear[0] == (
        "Hot rows: 5 of 12 are looked up at least 4 times and take 1.91 MiB; 1 of 2 tables are hot whole."
    )
    assert "1.00% +- 0.10% of hot samples, 3.00% +- 0.17% of cold ones" in clear[1]
    assert "They differ: batches of one kind are not drawn like the data as a whole" in clear[1]
    assert "which may be chance" in hot_sentences(ROWS, ClickCounts(100, 1), ClickCounts(100, 3))[1]
    assert "There is one kind only" in hot_sentences(ROWS, ClickCounts(100, 1), ClickCounts())[1]


@pytest.mark.slow
def test_too_few_bytes_are_refused(criteo_sample, tmp_path):
    with pytest.raises(ConfigError, match=r"got 10 bytes for them .*, needed at least \d+"):
        main([str(criteo_sample), "-o", str(tmp_path / "p.npz"), "--hot", "10"])
