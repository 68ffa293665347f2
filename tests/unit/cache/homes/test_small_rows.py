"""`SmallRows`: rounding equals its wording in NumPy, is idempotent, and nothing is lost on the way to the host."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from embershard.cache.homes.memory import MemoryRows
from embershard.cache.homes.quantised import QuantisedRows
from embershard.cache.homes.shape import PoolShape
from embershard.cache.homes.small_rows import SmallRows
from embershard.cache.rows.initial_weights import ShardWeights
from embershard.errors import CacheError, ConfigError
from tests.small_rounding import round_fp16, round_int8, seed_of

DIM, ROWS, FIRST_ROW = 16, 3000, 70_000
ORACLES: dict[str, Any] = {"int8": round_int8, "fp16": round_fp16}
TYPES = pytest.mark.parametrize("small_type", ["int8", "fp16"])


def zeros(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype)


def tables_of(first_column: int = 0) -> list[ShardWeights]:
    """Two tables, of which the first one's shard begins at another row than 0."""
    return [
        ShardWeights("clicks", 7, 64, -0.5, 0.5, FIRST_ROW, first_column),
        ShardWeights("users", 7, 64, -0.1, 0.1, 0, first_column),
    ]


def make_rows(small_type: Any, full: Tensor | None = None, first_column: int = 0, allocate: Any = zeros) -> SmallRows:
    tables = tables_of(first_column)
    full = torch.empty(0, dtype=torch.int64) if full is None else full
    return SmallRows(small_type, [ROWS, ROWS], tables, DIM, full, allocate)


def all_sizes(small_type: str, num_rows: int = 2 * ROWS) -> Tensor:
    """Rows over all exponents of the type, with zeros, outliers, subnormals, and rows of one sign."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(num_rows, DIM, generator=generator)
    low, high = (-140, 98) if small_type == "int8" else (-30, 13)
    rows *= 2.0 ** torch.randint(low, high, (num_rows, 1), generator=generator)
    rows[torch.rand(num_rows, DIM, generator=generator) < 0.1] = 0
    rows[::97] = 0
    rows[5::101] = -0.0
    rows[1::89, 3] *= 7.0
    rows[2::83] = rows[2::83].abs()
    return rows.clamp(-65504, 65504) if small_type == "fp16" else rows


def bits(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.int32)


def in_oracle(small_type: str, rows: Tensor, first_column: int = 0, **how: Any) -> Tensor:
    oracle, values = ORACLES[small_type], rows.numpy()
    return torch.cat(
        [
            torch.from_numpy(
                oracle(values[start : start + ROWS], np.arange(ROWS) + first, seed_of(name, 7), first_column, **how)
            )
            for name, start, first in (("clicks", 0, FIRST_ROW), ("users", ROWS, 0))
        ]
    )


@TYPES
@pytest.mark.parametrize("first_column", [0, 32])
def test_rounding_is_what_its_wording_says_for_all_sizes_of_numbers(small_type: str, first_column: int) -> None:
    rows, keys = make_rows(small_type, first_column=first_column), torch.arange(2 * ROWS)
    given = all_sizes(small_type)
    rounded = given.clone()
    rows.round(rounded, keys, keys)
    assert torch.equal(rounded, in_oracle(small_type, given, first_column))
    assert not torch.equal(rounded, in_oracle(small_type, given, first_column + 1))  # the column counts
    assert (rounded != given).float().mean() > 0.5


@TYPES
def test_a_rounded_row_stays_as_it_is(small_type: str) -> None:
    rows, keys = make_rows(small_type), torch.arange(2 * ROWS)
    once = all_sizes(small_type)
    rows.round(once, keys, keys)
    twice = once.clone()
    rows.round(twice, keys, keys)
    assert torch.equal(bits(once), bits(twice))


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"num_bits": 24}, {"by_inverse": True}])
def test_other_ways_to_round_are_seen_to_change_a_rounded_row(how: dict[str, Any]) -> None:
    """The test above can fail: both ways look the same, and are not idempotent."""
    given = np.random.default_rng(1).standard_normal((150_000, DIM)).astype(np.float32)  # 24 bits fail once in 500,000
    numbers = np.arange(len(given))
    once = round_int8(given, numbers, 5, **how)
    assert not np.array_equal(once, round_int8(once, numbers, 5, **how))
    right = round_int8(given, numbers, 5)
    assert np.array_equal(right, round_int8(right, numbers, 5))


@TYPES
def test_the_way_to_host_memory_and_back_changes_no_bit(small_type: str) -> None:
    full = torch.arange(0, 2 * ROWS, 7) if small_type == "int8" else None
    rows, keys = make_rows(small_type, full), torch.randperm(2 * ROWS, generator=torch.Generator().manual_seed(2))
    slots = torch.zeros(2 * ROWS + 1, DIM)
    places = torch.arange(1, 2 * ROWS + 1)
    slots[1:] = all_sizes(small_type)
    given = slots.clone()
    rows.round(slots, places, keys)
    rows.write(keys, slots, places)
    assert torch.equal(bits(rows.read(keys)), bits(slots[places]))
    if full is not None:
        is_full = torch.isin(keys, full)
        assert torch.equal(bits(slots[1:][is_full]), bits(given[1:][is_full]))
        assert not torch.equal(slots[1:][~is_full], given[1:][~is_full])


@TYPES
def test_errors_add_up_to_nothing(small_type: str) -> None:
    """Updates far smaller than half a step arrive, as many fair draws would add up; to nearest all would be lost."""
    rows, keys = make_rows(small_type), torch.arange(2 * ROWS)
    given = torch.rand(2 * ROWS, DIM, generator=torch.Generator().manual_seed(4)) + 0.5
    given[:, 0] = 2.0  # a step of all rows, which no update changes
    rounded = given.clone()
    rows.round(rounded, keys, keys)
    start, small = rounded.clone(), 2.0**-9 if small_type == "int8" else 2.0**-13
    generator = torch.Generator().manual_seed(5)
    for _ in range(100):
        # No two the same: the draw is a function of the sum, so the same update of the same weight has the same fate.
        rounded[:, 1:] += 2 * small * torch.rand(2 * ROWS, DIM - 1, generator=generator)
        rows.round(rounded, keys, keys)
    moved = (rounded - start)[:, 1:].mean().item() / (100 * small)
    step = 2.0 / 127 if small_type == "int8" else 2.0**-10
    spread = math.sqrt(100 * small * step / (2 * ROWS * (DIM - 1))) / (100 * small)  # of a sum of fair draws
    assert abs(moved - 1) < 6 * spread < 0.1


@TYPES
def test_rows_that_were_never_written_are_initial_weights_rounded(small_type: str) -> None:
    rows = make_rows(small_type, torch.tensor([4, 5000]) if small_type == "int8" else None)
    store = MemoryRows(PoolShape([ROWS, ROWS], DIM, initial=[
            ShardWeights("clicks", 7, 64, -0.5, 0.5, FIRST_ROW), ShardWeights("users", 7, 64, -0.1, 0.1)
        ]))  # fmt: skip
    store.make_all()
    initial = store.weights.clone()
    expected = in_oracle(small_type, initial)
    if small_type == "int8":
        expected[[4, 5000]] = initial[[4, 5000]]
    assert torch.equal(rows.read(torch.arange(2 * ROWS)), expected)


@TYPES
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e31])
def test_a_weight_that_is_no_number_ends_the_run_by_name(small_type: str, bad: float) -> None:
    rows, slots = make_rows(small_type), torch.rand(9, DIM)
    slots[4, 7] = bad
    with pytest.raises(CacheError, match=rf"'users', row 17: its largest weight is .*{small_type} rows hold"):
        rows.round(slots, torch.tensor([3, 4, 5]), torch.tensor([8, ROWS + 17, 9]))


@TYPES
def test_a_slot_that_was_not_rounded_is_not_written_back(small_type: str) -> None:
    rows, slots = make_rows(small_type), torch.rand(3, DIM)
    rows.round(slots, torch.arange(3), torch.arange(3))
    slots[1, 2] = torch.nextafter(slots[1, 2], torch.tensor(9.0))
    with pytest.raises(CacheError, match=r"1 of 3 rows of the tables .* are not what an update leaves"):
        rows.write(torch.arange(3), slots)


@TYPES
def test_what_was_read_of_a_checkpoint_is_rounded_once(small_type: str) -> None:
    one, other = make_rows(small_type), make_rows(small_type)
    given = all_sizes(small_type, ROWS)
    keys = torch.arange(ROWS, 2 * ROWS)
    one.put(keys, given)
    saved = one.read(keys)
    assert not torch.equal(saved, given)
    other.put(keys[100:], saved[100:])
    other.put(keys[:100], saved[:100])
    assert torch.equal(bits(other.read(keys)), bits(saved))


def test_frozen_small_rows_are_those_of_one_moment() -> None:
    home = QuantisedRows(PoolShape([ROWS, ROWS], DIM, initial=tables_of()), "int8", torch.tensor([3]))
    rows, (memory,) = home.small, home.views.tensors
    keys = torch.arange(2 * ROWS)
    before = rows.read(keys)
    frozen = home.freeze()
    some = torch.tensor([3, 8, ROWS + 1])
    home.before_write(some)
    changed = torch.full((3, DIM), 0.25)
    rows.round(changed, torch.arange(3), some)
    rows.write(some, changed)
    assert torch.equal(frozen.read(memory), before)
    assert torch.equal(rows.read(some), changed)
    assert not memory.any()  # an address only


@pytest.mark.parametrize("host", ["memory", "mmap"])
def test_a_host_tier_of_small_rows_takes_their_bytes(host: Any, tmp_path: Path) -> None:
    states = [("momentum", torch.Size([]), torch.float32)]
    shape = PoolShape([ROWS], DIM, torch.float32, states, [ShardWeights("clicks", 7, DIM, -0.5, 0.5)])
    folder = str(tmp_path) if host == "mmap" else None
    store = QuantisedRows(shape, "int8", torch.tensor([1, 5]), folder=folder)
    assert (store.row_bytes, store.slot_row_bytes) == (DIM + 2 + 4, 4 * DIM + 4 + 4)
    assert store.host_bytes == ROWS * (DIM + 2 + 4) + 2 * 4 * DIM
    assert store.read(torch.tensor([1, 7])).abs().max() > 0
    with pytest.raises(CacheError, match="they would read as zeros"):
        store.check_views()
    assert not store.views.tensors[0].any()


def test_too_few_columns_are_refused() -> None:
    tables = [ShardWeights("clicks", 7, 6, -0.5, 0.5)]
    with pytest.raises(ConfigError, match="6 columns on a rank, needed a multiple of 4"):
        SmallRows("int8", [10], tables, 6, torch.empty(0, dtype=torch.int64), zeros)


@TYPES
def test_small_rows_take_the_bytes_they_say(small_type: str) -> None:
    full = torch.tensor([0, 9]) if small_type == "int8" else None
    rows = make_rows(small_type, full)
    assert rows.row_bytes * 2 * ROWS == sum(part.nbytes for part in rows.parts)
    assert rows.full_bytes == (2 * DIM * 4 if full is not None else 0)
