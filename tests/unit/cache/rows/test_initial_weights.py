"""Initial weights are Philox4x32-10 of seed, table, row and column, whatever part of a table is made."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.cache.loops.initial_rows import half_bits, write_run
from embershard.cache.rows.initial_weights import ShardWeights
from embershard.cache.rows.lazy_rows import LazyRows

_MASK = 2**32 - 1


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """Four words, by the paper's definition."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return [c0, c1, c2, c3]


def weights_of_id(table: ShardWeights, number: int) -> torch.Tensor:
    """Weights of an id in a table, by the definition: [D]."""
    words = [
        word >> 8
        for group in range(-(-table.dim // 4))
        for word in philox((number & _MASK, (number >> 32) & _MASK, group, 1), table.key)
    ]
    low, span = np.float32(table.low), np.float32(table.high) - np.float32(table.low)
    return torch.from_numpy(low + span * (np.array(words[: table.dim], np.float32) * np.float32(2.0**-24)))


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((_MASK,) * 4, (_MASK,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_the_reference_gives_the_published_words(counter, key, words):
    """The known answers of the authors' library, Random123."""
    assert " ".join(f"{word:08x}" for word in philox(counter, key)) == words


@given(st.integers(0, 2**63 - 20), st.tuples(st.integers(0, _MASK), st.integers(0, _MASK)))
def test_the_compiled_loop_equals_the_reference(counter, key):
    out = np.empty(40, np.float32)
    write_run(out, 4, counter, 9, np.uint32(key[0]), np.uint32(key[1]), np.float32(0), np.float32(1))
    expected = [word >> 8 for n in range(counter, counter + 9) for word in philox((n & _MASK, n >> 32, 0, 0), key)]
    assert (out[4:].astype(np.float64) * 2**24).astype(np.int64).tolist() == expected


_IDS = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.slow
@given(st.lists(_IDS, min_size=1, max_size=9, unique=True), st.sampled_from([torch.float32, torch.float16]))
def test_weights_of_ids_are_those_of_the_reference_in_any_row_and_shard(ids, dtype):
    """Whole tables and one cut by columns, in one pool."""
    tables = [ShardWeights("clicks", 3, 8, -2.0, 5.0), ShardWeights("users", 3, 8, 0.0, 1.0, 7)]
    tables.append(ShardWeights("users", 3, 24, 0.0, 1.0, 7, first_column=12))
    rows = torch.full((3, 10, 8), -9.0, dtype=dtype)
    lazy = LazyRows(rows.view(30, 8), [10, 10, 10], tables)
    for table, first in enumerate((0, 10, 20)):
        lazy.reinitialise(torch.arange(first, first + len(ids)).flip(0), torch.tensor(ids))
        expected = torch.stack([weights_of_id(tables[table], each) for each in reversed(ids)])
        column = tables[table].first_column
        assert torch.equal(rows[table, : len(ids)], expected[:, column : column + 8].to(dtype))
    assert (rows[:, len(ids) :] == -9.0).all()


def test_the_weights_of_an_id_never_change_and_are_not_those_of_a_row():
    rows = torch.zeros(3, 4)
    LazyRows(rows, [3], [ShardWeights("t_C1", 0, 4, -1.0, 1.0)]).reinitialise(torch.arange(3), torch.tensor([0, 1, -1]))
    assert [[round(w * 2**23) for w in row] for row in rows.tolist()] == [
        [286842, -6063492, -5506209, 686604],
        [1775315, 5273095, -6520146, -7885862],
        [8205822, 6336370, -7464556, -3426947],
    ]
    of_rows = torch.empty(1000, 4)
    ShardWeights("t_C1", 0, 4, -1.0, 1.0).write(of_rows)
    assert not torch.isin(rows, of_rows).any()


@given(st.integers(1, 40), st.integers(1, 13), st.data())
def test_every_part_of_a_table_equals_the_whole(rows, dim, data):
    whole = torch.empty(rows, dim)
    ShardWeights("clicks", 3, dim, -2.0, 5.0).write(whole)
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, dim - 1))
    part = torch.empty(data.draw(st.integers(1, rows - row)), data.draw(st.integers(1, dim - column)))
    ShardWeights("clicks", 3, dim, -2.0, 5.0, row, column).write(part)
    assert torch.equal(part, whole[row : row + part.shape[0], column : column + part.shape[1]])


@pytest.mark.slow
def test_large_tables_are_written_in_parts():
    whole, last = torch.empty(300_000, 4), torch.empty(3, 4)
    ShardWeights("clicks", 3, 4, -2.0, 5.0).write(whole)
    ShardWeights("clicks", 3, 4, -2.0, 5.0, first_row=299_997).write(last)
    assert torch.equal(whole[-3:], last)
    assert whole.unique().numel() > 1_000_000


def test_weights_are_uniform_and_seeds_and_tables_differ():
    weights = {}
    for table, seed in (("a", 0), ("b", 0), ("a", 1)):
        weights[table, seed] = torch.empty(20_000, 16)
        ShardWeights(table, seed, 16, -0.5, 1.5).write(weights[table, seed])
    for found in weights.values():
        assert -0.5 <= found.min() < -0.4999
        assert 1.4999 < found.max() <= 1.5
        counts = torch.histc(found, 100, -0.5, 1.5)
        assert ((counts - 3200) ** 2 / 3200).sum() < 160  # chi-square of 99 degrees: above it in 1 of 10,000
        assert abs(torch.corrcoef(found.T).fill_diagonal_(0)).max() < 0.04
        assert abs(torch.corrcoef(torch.stack([found[:-1, 0], found[1:, 0]]))[0, 1]) < 0.04
    a, b, c = weights.values()
    assert (a == b).float().mean() < 0.001
    assert (a == c).float().mean() < 0.001


def test_the_weights_of_a_seed_and_table_never_change():
    """Runs of different versions and machines start alike."""
    weights = torch.empty(2, 4)
    ShardWeights("t_C1", 0, 4, -1.0, 1.0).write(weights)
    assert [[round(w * 2**23) for w in row] for row in weights.tolist()] == [
        [-6476778, -7675593, -7028849, -2350453],
        [-7215231, 7198255, -6615897, -7884790],
    ]


def test_a_range_of_one_number_is_that_number():
    weights = torch.empty(5, 6)
    ShardWeights("a", 0, 6, 0.1, 0.1).write(weights)
    assert (weights == 0.1).all()


@pytest.mark.slow
def test_half_precision_is_the_rounded_weight():
    """As torch rounds, so that tables whole on a device start alike."""
    single, half = torch.empty(1000, 8), torch.empty(1000, 8, dtype=torch.float16)
    for low, high in ((-1e-4, 1e-4), (-0.3, 0.3), (-70000.0, 70000.0)):
        ShardWeights("a", 0, 8, low, high).write(single)
        ShardWeights("a", 0, 8, low, high).write(half)
        assert torch.equal(half, single.half())
    values = torch.cat([torch.randn(3000) * scale for scale in (1e-8, 1e-6, 1e-5, 1, 1e5)])
    edges = torch.tensor([65519.9, 65520.0, 0.0, -0.0, 2.0**-14, 2.0**-14 - 2.0**-25, float("inf")])
    for value in torch.cat([values, edges, torch.arange(4096) * 2.0**-25]):
        assert half_bits(np.float32(value)) == value.half().view(torch.int16).numpy().view(np.uint16)
