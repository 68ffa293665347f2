"""Generated samples: the published shares, the same data for everybody, and labels that can be learned."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.data import DataConfig, SyntheticConfig
from embershard.data.sources.synthetic import (
    CRITEO_KAGGLE,
    MLPERF_BAG_SIZES,
    Popularity,
    SyntheticSource,
    SyntheticTable,
    scatter,
)
from embershard.errors import ConfigError
from tests.covering import examples

NUM_DRAWN = 100_000


def source_of(*, seed: int = 0, eval_fraction: float = 0.1, **settings: object) -> SyntheticSource:
    synthetic = SyntheticConfig(**settings)  # type: ignore[arg-type]
    return SyntheticSource(DataConfig(seed=seed, eval_fraction=eval_fraction, synthetic=synthetic))


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    ranks = np.argsort(np.argsort(scores)) + 1
    clicks = labels.sum()
    return float((ranks[labels == 1].sum() - clicks * (clicks + 1) / 2) / (clicks * (len(labels) - clicks)))


@pytest.fixture(scope="module")
def full_size():
    """Source and first samples with the full row counts."""
    source = source_of(scale=1.0)
    return source, source.samples(np.arange(NUM_DRAWN))


@pytest.mark.slow
def test_full_scale_has_the_published_rows(full_size):
    rows = [feature.num_rows for feature in full_size[0].schema.sparse]
    assert rows == [table.num_rows for table in CRITEO_KAGGLE]
    assert sum(rows) == 33_762_577


@pytest.mark.parametrize("number", range(26))
def test_shares_of_the_most_popular_rows(full_size, number):
    table, ids = CRITEO_KAGGLE[number], full_size[1].values[number]
    assert ids.min() >= 1
    assert ids.max() < table.num_rows
    counts = np.sort(np.unique(ids, return_counts=True)[1])[::-1] / NUM_DRAWN
    noise = 4 * np.sqrt(table.top_1 * (1 - table.top_1) / NUM_DRAWN)
    assert counts[0] == pytest.approx(table.top_1, abs=noise + 0.001)
    assert counts[:10].sum() == pytest.approx(table.top_10, abs=noise + 0.015)


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 9, 23])
def test_tail_falls_with_the_published_exponent(number):
    table = CRITEO_KAGGLE[number]
    uniform = (np.arange(2_000_000) + 0.5) / 2_000_000
    counts = np.bincount(Popularity(table, table.num_rows - 1).ranks(uniform))
    near, far = counts[20:40].sum(), counts[200:400].sum()
    exponent = 1 - np.log(far / near) / np.log(10)
    assert exponent == pytest.approx(table.zipf_exponent, abs=0.05)


def test_new_rows_keep_coming(full_size):
    """As in the real data: a batch of 10k samples touches tens of thousands of rows, most of them once."""
    _, counts = np.unique(full_size[1].values[2], return_counts=True)
    assert 30_000 < len(counts) < 70_000
    assert (counts == 1).mean() > 0.5


def test_hot_rows_are_scattered(full_size):
    table = full_size[0].tables[2]
    hot = np.sort(table.rows_of_ranks(np.arange(1000)))
    gaps = np.diff(hot)
    assert gaps.min() > table.num_rows / 1000 / 4
    assert gaps.max() < table.num_rows / 1000 * 4


@given(st.integers(2, 3000), st.integers(0, 2**64 - 1))
def test_scattering_is_a_bijection(num_ids, key):
    step, shift = scatter(key, num_ids)
    assert len(set((np.arange(num_ids) * step + shift) % num_ids)) == num_ids


@given(st.floats(1e-7, 3), st.integers(0, 25))
@examples(80)
def test_any_scale_gives_ids_inside_the_table(scale, number):
    config = SyntheticConfig(scale=scale)
    table = SyntheticTable(0, number, CRITEO_KAGGLE[number], config)
    ids = table.draw(np.arange(500))
    assert table.num_rows >= 3
    assert ids.min() >= 1
    assert ids.max() < table.num_rows
    edges = table.popularity.ranks(np.array([0.0, 1 - 2.0**-53]))
    assert edges[0] == 0
    assert edges[1] < table.num_rows - 1


@pytest.mark.slow
def test_sample_is_a_function_of_seed_and_number():
    source, other = source_of(seed=3), source_of(seed=4)
    numbers = np.random.default_rng(0).permutation(5000)
    together, alone = source.samples(np.arange(5000)).take(numbers), source_of(seed=3).samples(numbers)
    assert np.array_equal(together.dense, alone.dense)
    assert np.array_equal(together.labels, alone.labels)
    for first, second in zip(together.values, alone.values, strict=True):
        assert np.array_equal(first, second)
    different = other.samples(numbers)
    assert not np.array_equal(different.dense, alone.dense)
    assert not np.array_equal(different.values[2], alone.values[2])


@pytest.mark.slow
def test_same_data_for_any_number_of_ranks(open_stream):
    config = DataConfig(num_workers=0, synthetic=SyntheticConfig(num_samples=3000, bag_sizes=(2,)))
    source = SyntheticSource(config)
    epochs = []
    for world_size in (1, 3):
        streams = [
            open_stream(source, config, batch_size=300 // world_size, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        steps = list(zip(*streams, strict=True))
        bags = [[b.sparse_features["C3"].values() for b in step] for step in steps]
        epochs.append(
            (
                torch.cat([b.dense_features for step in steps for b in step]),
                torch.cat(list(itertools.chain(*bags))),
            )
        )
    assert torch.equal(epochs[0][0], epochs[1][0])
    assert torch.equal(epochs[0][1], epochs[1][1])
    assert len(epochs[0][0].unique(dim=0)) == 2700


def test_eval_is_the_tail(open_stream):
    config = DataConfig(eval_fraction=0.2, shuffle=False, synthetic=SyntheticConfig(num_samples=10_000))
    source = SyntheticSource(config)
    assert source.chunks("train").num_samples == 8000
    held_out = next(open_stream(source, config, batch_size=2000, split="eval"))
    assert np.array_equal(held_out.labels.numpy(), source.samples(np.arange(8000, 10_000)).labels)


@pytest.mark.slow
def test_labels_can_be_learned(full_size):
    source, block = full_size
    assert block.labels.mean() == pytest.approx(0.224, abs=0.01)
    scores = source.probabilities(np.arange(NUM_DRAWN))
    assert scores.mean() == pytest.approx(block.labels.mean(), abs=0.006)
    assert auc(scores, block.labels) > 0.82
    assert auc(np.roll(scores, 1), block.labels) == pytest.approx(0.5, abs=0.02)


@pytest.mark.slow
def test_a_linear_model_learns_them_within_a_hundred_steps(open_stream):
    config = DataConfig(num_workers=0, synthetic=SyntheticConfig(num_samples=200_000, scale=0.001))
    source = SyntheticSource(config)
    rows = torch.tensor([feature.num_rows for feature in source.schema.sparse])
    starts = (rows.cumsum(0) - rows)[:, None]
    weights, dense = torch.nn.EmbeddingBag(int(rows.sum()), 1, mode="sum"), torch.nn.Linear(13, 1)
    torch.nn.init.zeros_(weights.weight)
    optimizer = torch.optim.Adagrad([*weights.parameters(), *dense.parameters()], lr=0.1)

    def score(batch):
        ids = batch.sparse_features.values().view(26, -1) + starts
        return (weights(ids.T) + dense(batch.dense_features)).squeeze(1)

    for _, batch in zip(range(100), open_stream(source, config, batch_size=1024), strict=False):
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(score(batch), batch.labels).backward()
        optimizer.step()
    held_out = next(open_stream(source, config, batch_size=20_000, split="eval"))
    assert auc(score(held_out).detach().numpy(), held_out.labels.numpy()) > 0.75


@pytest.mark.slow
def test_bags_are_a_fixed_function_of_their_first_id():
    source, single = source_of(bag_sizes=MLPERF_BAG_SIZES), source_of()
    block = source.samples(np.arange(4000))
    assert block.lengths == MLPERF_BAG_SIZES
    assert sum(MLPERF_BAG_SIZES) == 214
    for number, size in enumerate(MLPERF_BAG_SIZES):
        bags = block.values[number].reshape(-1, size)
        num_rows = source.schema.sparse[number].num_rows
        assert np.array_equal(bags[:, 0], single.samples(np.arange(4000)).values[number])
        assert bags.min() >= 1
        assert bags.max() < num_rows
        assert len(np.unique(bags, axis=0)) == len(np.unique(bags[:, 0]))
    big = block.values[20].reshape(-1, 100)
    rest = big[np.unique(big[:, 0], return_index=True)[1], 1:]
    assert rest.mean() == pytest.approx(source.schema.sparse[20].num_rows / 2, rel=0.02)


def test_batch_of_bags(open_stream):
    config = DataConfig(num_workers=0, synthetic=SyntheticConfig(num_samples=1000, bag_sizes=(3,)))
    batch = next(open_stream(SyntheticSource(config), config, batch_size=7))
    assert batch.sparse_features.values().shape == (26 * 7 * 3,)
    assert batch.sparse_features.lengths().tolist() == [3] * (26 * 7)
    assert batch.sparse_features.keys() == [f"C{i}" for i in range(1, 27)]


def test_drift_moves_the_ranking_by_as_much_as_it_says():
    num_samples, rows = 1_000_000, 50_000
    steady, moving = (
        SyntheticTable(0, 0, CRITEO_KAGGLE[2], SyntheticConfig(scale=rows / 10131227, drift=d, num_samples=num_samples))
        for d in (0.0, 0.25)
    )
    ranks = np.arange(rows - 1)
    for moment, share in ((0, 0.0), (num_samples // 2, 0.125), (num_samples, 0.25)):
        now = moving.rows_of_ranks(moving.drifted(ranks, np.full(rows - 1, moment)))
        assert len(np.unique(now)) == rows - 1, "the ranking is a bijection at any time"
        assert (now != steady.rows_of_ranks(ranks)).mean() == pytest.approx(share, abs=0.01)


def test_wrong_settings_are_named():
    with pytest.raises(ConfigError, match=r"data.synthetic.bag_sizes = .* needed no number, 1 number or 26"):
        SyntheticConfig(bag_sizes=(1, 2))
    with pytest.raises(ConfigError, match=r"data.synthetic.drift = 2"):
        SyntheticConfig(drift=2)
    with pytest.raises(ConfigError, match=r"data.synthetic.scale = 0"):
        SyntheticConfig(scale=0)
