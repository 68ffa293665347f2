"""`against_best`: configurations that differ over seeds, and those that do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from embershard.sweeps import spread as module
from embershard.sweeps.spread import AgainstBest, against_best


@pytest.fixture(autouse=True)
def plain_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "figures_of", lambda result: result.quality)


def configuration(*runs: tuple[int, float]) -> Any:
    """A configuration whose runs have these seeds and AUCs."""
    results = [SimpleNamespace(quality={"auc": auc, "logloss": 1 - auc}) for _, auc in runs]
    return SimpleNamespace(seeds=[(seed, None) for seed, _ in runs], results=results)


def test_pairs_are_of_the_same_seeds():
    """Seeds change the AUC by much more than the configurations differ: unpaired, nothing would be told."""
    levels = {1: 0.60, 2: 0.70, 3: 0.80, 4: 0.65}
    best = configuration(*levels.items())
    worse = configuration(*((seed, auc - 0.01 - seed * 1e-4) for seed, auc in levels.items()))
    alike = configuration(*((seed, auc + (-1) ** seed * 0.01 - 1e-3) for seed, auc in levels.items()))
    title, texts = against_best([worse, best, alike], "auc")
    assert title == "beside the best AUC"
    assert [text.partition(" (")[0] for text in texts] == ["worse", "best", "no difference"]
    _, by_loss = against_best([worse, best, alike], "logloss")
    assert [text.partition(" (")[0] for text in by_loss] == ["worse", "best", "no difference"]


def test_what_is_not_known_is_said():
    two = configuration((1, 0.7), (2, 0.72))
    assert against_best([two], "auc")[1] == [""]
    others = [
        configuration((1, 0.6), (1, 0.6)),  # repeats of one seed
        configuration((1, 0.7), (2, 0.72)),
        configuration((9, 0.6), (8, 0.6)),
        configuration(),
    ]
    assert against_best([two, *others], "auc")[1] == ["best", "one seed: not known", "equal", "no seed in common", ""]


@pytest.mark.slow
@pytest.mark.parametrize("num_others", [1, 4])
def test_all_intervals_hold_in_95_of_100_cases(num_others: int):
    draw, wrong, trials = np.random.default_rng(0), 0, 1000
    for _ in range(trials):
        rows = draw.normal(0.01, 0.1, (num_others, 4)).tolist()
        intervals = [AgainstBest("auc", tuple(row), num_others).interval for row in rows]
        wrong += any(each is None or not each[0] <= 0.01 <= each[1] for each in intervals)
    assert 0.02 < wrong / trials < 0.08
