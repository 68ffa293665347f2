"""Generated samples whose features are correlated, as in real clicks: each feature keeps its popularity, and samples of
popular rows only are as frequent as in a real sample."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from embershard.data import DataConfig, SyntheticConfig
from embershard.data.sources.synthetic import SyntheticSource, correlated
from embershard.errors import ConfigError

NUM_SAMPLES = 10_000
SHOWN = {"correlation": 0.65, "rarity_logit": 0.3}  # as in docs/data.md
# The first 10,000 samples of Criteo 1TB's day 0: share of rows -> share of samples that need no others.
REAL = {0.0158: 0.030, 0.0632: 0.165, 0.2526: 0.374}
RATES = np.array([0.0188, 0.0280])  # of clicks: samples that need the most frequent 6.32 % of the rows only, and others


def source_of(**settings: float) -> SyntheticSource:
    return SyntheticSource(DataConfig(synthetic=SyntheticConfig(**settings)))  # type: ignore[arg-type]


def are_hot(ids: list[np.ndarray], share: float) -> np.ndarray:
    """True for the samples whose rows are all among the most frequent `share` of those that occur."""
    columns, start = [], 0
    for rows in ids:
        distinct, numbers = np.unique(rows, return_inverse=True)
        columns.append(numbers + start)
        start += len(distinct)
    keys = np.stack(columns, axis=1)
    is_hot = np.zeros(start, dtype=bool)
    is_hot[np.argsort(-np.bincount(keys.ravel()), kind="stable")[: round(share * start)]] = True
    return is_hot[keys].all(axis=1)


def test_defaults_give_the_samples_of_earlier_versions():
    """The digest is from before there was a correlation."""
    block = SyntheticSource(DataConfig(seed=3, synthetic=SyntheticConfig(drift=0.2))).samples(np.arange(5000))
    digest = hashlib.sha256(b"".join(a.tobytes() for a in (block.labels, *block.values)))
    assert digest.hexdigest() == "c15e8a23b6a1e134e92555bf3456a56ff4d4d0b425da8e7c16c4ba7dec19b28f"


@pytest.mark.slow
def test_the_real_sample_is_as_it_says_here(criteo_text):
    cells = np.array([line.split("\t") for line in criteo_text.decode().splitlines()])
    columns = [np.unique(column, return_inverse=True)[1] for column in cells[:, 14:].T]
    for share, real in REAL.items():
        assert are_hot(columns, share).mean() == pytest.approx(real, abs=0.001)
    hot = are_hot(columns, 0.0632)
    rates = [(cells[which, 0] == "1").mean() for which in (hot, ~hot)]
    assert rates == pytest.approx(RATES, abs=0.0001)


@pytest.mark.slow
def test_all_hot_samples_are_as_frequent_as_in_a_real_sample():
    """Within a fifth; independent features give less than a third of it."""
    ids, _ = source_of(**SHOWN).features(np.arange(NUM_SAMPLES))
    independent, _ = source_of().features(np.arange(NUM_SAMPLES))
    for share, real in REAL.items():
        assert are_hot(ids, share).mean() == pytest.approx(real, rel=0.2), share
        assert are_hot(independent, share).mean() < real / 3, share


@pytest.mark.slow
def test_each_feature_keeps_its_popularity():
    ids, _ = source_of(**SHOWN).features(np.arange(NUM_SAMPLES))
    independent, _ = source_of().features(np.arange(NUM_SAMPLES))
    for number, (one, other) in enumerate(zip(ids, independent, strict=True)):
        size = int(max(one.max(), other.max())) + 1
        shares = [np.bincount(rows, minlength=size) / NUM_SAMPLES for rows in (one, other)]
        assert np.abs(shares[0] - shares[1]).max() < 0.03, f"C{number + 1}"
        top = np.argsort(-shares[1])[:10]
        assert shares[0][top].sum() == pytest.approx(shares[1][top].sum(), abs=0.03), f"C{number + 1}"


def test_correlation_is_that_of_a_gaussian_copula():
    rng = np.random.default_rng(0)
    rarity = rng.standard_normal(200_000)
    uniform = [correlated(rng.random(200_000), rarity, 0.7) for _ in range(2)]
    assert all(0.0 <= u.min() < u.max() < 1.0 for u in uniform)
    assert np.abs(np.quantile(uniform[0], [0.1, 0.5, 0.9]) - [0.1, 0.5, 0.9]).max() < 0.005
    of_ranks = np.corrcoef(*uniform)[0, 1]
    assert of_ranks == pytest.approx(6 / np.pi * np.arcsin(0.7 / 2), abs=0.01)


@pytest.mark.slow
def test_samples_of_popular_rows_are_clicked_less():
    """The difference of the logits that the real sample has: 1.88 % of hot samples are clicked, 2.80 % of the others;
    the rows' own weights, which are drawn, come on top, so compare with the same samples without it."""
    numbers = np.arange(NUM_SAMPLES)
    source, control = source_of(**SHOWN), source_of(correlation=SHOWN["correlation"])
    hot = are_hot(source.features(numbers)[0], 0.0632)

    def gap(of: SyntheticSource) -> float:
        logits = np.log(1 / (1 / of.probabilities(numbers) - 1))
        return float(logits[hot].mean() - logits[~hot].mean())

    real = np.log(RATES / (1 - RATES))
    assert gap(source) - gap(control) == pytest.approx(real[0] - real[1], abs=0.1)
    assert source.samples(numbers).labels.mean() == pytest.approx(0.224, abs=0.015)


@pytest.mark.slow
def test_samples_are_functions_of_their_numbers_with_correlation_too():
    numbers = np.random.default_rng(0).permutation(3000)
    together, alone = source_of(**SHOWN).samples(np.arange(3000)).take(numbers), source_of(**SHOWN).samples(numbers)
    assert np.array_equal(together.labels, alone.labels)
    assert all(np.array_equal(a, b) for a, b in zip(together.values, alone.values, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [0.0, 0.7])
def test_locality_is_the_share_of_lookups_by_popularity(correlation):
    """The most frequent row of C5 takes 67.0 % of the lookups; half of them is left, and a share of the other half."""
    for locality in (1.0, 0.5, 0.0):
        ids, _ = source_of(locality=locality, scale=1.0, correlation=correlation).features(np.arange(NUM_SAMPLES))
        rows = np.bincount(ids[4], minlength=305)
        assert rows[0] == 0
        assert rows.max() / NUM_SAMPLES == pytest.approx(0.67 * locality + (1 - locality) / 304, abs=0.02)
    assert rows[1:].min() > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"correlation": 1.0}, r"synthetic.correlation = 1.0; needed a number in \[0, 1\)"),
        ({"locality": 1.5}, r"synthetic.locality = 1.5; needed a number in \[0, 1\]"),
        ({"rarity_logit": 0.3}, "synthetic.rarity_logit = 0.3; needed .* and 0 without synthetic.correlation"),
    ],
)
def test_settings_that_cannot_be_meant(settings, message):
    with pytest.raises(ConfigError, match=message):
        SyntheticConfig(**settings)
