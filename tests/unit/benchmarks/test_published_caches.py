"""The replays of published caches, at toy size."""

from __future__ import annotations

import doctest
import json
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks import published_caches
from benchmarks.published_caches import KnownRows, ParetoStream, missed_share, misses
from embershard.cache.config import Policy
from embershard.extras.profile_picture.hit_rate_curve import offline_optimum

pytestmark = pytest.mark.slow


def by_the_batch(batches: Sequence[np.ndarray], known: int) -> tuple[int, int, int]:
    """The rule as sets: what stays after a batch, and the known batches in full."""
    held: set[int] = set()
    fills = most_known = most_needed = 0
    for now, batch in enumerate(batches):
        rows, ahead = set(batch.tolist()), set[int]().union(*(each.tolist() for each in batches[now + 1 :][:known]))
        fills += len(rows - held)
        most_needed = max(most_needed, len(rows | held))
        most_known = max(most_known, len(rows | ahead))
        held = (held | rows) & ahead
    return fills, most_known, most_needed


@pytest.mark.parametrize("known", [1, 5, 80])
def test_the_rule_fills_what_sets_of_rows_do(known: int) -> None:
    random = np.random.default_rng(known)
    batches = [np.unique((random.random(12) ** 3 * 200).astype(np.int64)) for _ in range(60)]
    rule = KnownRows.of(batches, known)
    assert (rule.fills, rule.most_known, rule.most_needed) == by_the_batch(batches, known)
    optimum = offline_optimum(batches, rule.most_needed)
    assert optimum is not None
    assert optimum <= rule.fills


def test_lookups_are_as_frequent_as_the_arithmetic_says() -> None:
    stream = ParetoStream(1.2, num_tables=2, num_rows=5000, num_samples=20_000)
    keys, lengths = stream.batch(3)
    assert lengths.tolist() == [20_000, 20_000]
    counts = stream.true_counts()
    for table, rows in enumerate(keys.numpy().reshape(2, -1) - np.array([[0], [5000]])):
        assert (rows.min(), rows.max() < 5000) == (0, True)
        for held in (1, 400):
            share = missed_share(1.2, 5000, held)
            assert (rows >= held).mean() == pytest.approx(share, abs=5 * np.sqrt(share / 20_000))
            hits = counts.between(5000 * table, 5000).hits
            assert hits[held:].sum() / hits.sum() == pytest.approx(share)


@pytest.mark.parametrize("policy", ["static", "frequency"])
def test_a_cache_by_true_frequencies_misses_what_is_in_no_slot(policy: Policy) -> None:
    stream = ParetoStream(1.4, num_tables=2, num_rows=4000, num_samples=50)
    found = misses(stream, stream.true_counts(), policy, num_slots=800, steps=400)
    assert found.lookups == 2 * 50 * 200
    lowest, highest = (missed_share(1.4, 4000, held) for held in (400, 400 - 50))
    spread = 4 * np.sqrt(highest / found.lookups)
    assert lowest - spread < 1 - found.hits_lookups / found.lookups < highest + spread


def test_a_cache_that_grew_is_refused() -> None:
    stream = ParetoStream(1.2, num_tables=1, num_rows=4000, num_samples=500)
    with pytest.raises(RuntimeError, match=r"grew from 20 to \d+ slots"):
        misses(stream, stream.true_counts(), "frequency", num_slots=20, steps=2)


def test_the_command_prints_and_writes_json(tmp_path, monkeypatch, capsys) -> None:
    file = tmp_path / "result.json"
    of_bagpipe = ["--batches", "60", "--batch-size", "16", "--known", "24", "--scale", "0.0002"]
    of_ugache = ["--steps", "40", "--samples", "50", "--tables", "2", "--rows", "4000", "--profile-batches", "5"]
    arguments = ["published_caches", "all", *of_bagpipe, *of_ugache, "--output", str(file)]
    monkeypatch.setattr(sys, "argv", arguments)
    published_caches.main()
    result = json.loads(file.read_text())
    assert json.loads(capsys.readouterr().out) == result
    points = result["bagpipe"]["points"]
    assert [(point["size"], point["scoring"]) for point in points] == [
        (size, scoring) for size in ("known", "eighth", "fewest") for scoring in ("lfu", "frequency")
    ]
    equal, _, eighth, _, fewest, _ = points
    rule = result["bagpipe"]["rule"]
    assert [equal["slots"], eighth["slots"]] == [rule["most_known"], rule["most_known"] // 8]
    assert eighth["slots"] < fewest["slots"] < equal["slots"]
    assert result["bagpipe"]["distinct_rows"] <= equal["optimum_fills"] <= equal["fills"] <= rule["fills"]
    assert equal["reached"] is (equal["over_optimum"] <= 1.03)
    assert fewest["reached"] is None
    assert [(point["exponent"], point["profile"], point["policy"]) for point in result["ugache"]] == [
        (exponent, profile, policy)
        for exponent in (1.2, 1.4)
        for profile in ("true", "250 samples")
        for policy in ("static", "frequency")
    ]
    true, _, counted, _ = result["ugache"][:4]
    assert true["missed_percent"] < counted["missed_percent"]
    assert true["slots"] == 640
    assert counted["reached"] is None


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(published_caches).failed == 0
