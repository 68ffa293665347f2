"""An id that is no row of its table is found, and named so that it can be found in the data."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.errors import DataError, IdOutOfRangeError
from embershard.sharding.torchrec.modules import check_bounds, rows_by_feature

ROWS = {"user": ("users", 10), "item": ("items", 100), "ad": ("ads", 2**33)}


def features(**bags: list[list[int]]) -> KeyedJaggedTensor:
    values = [i for feature in bags.values() for bag in feature for i in bag]
    lengths = [len(bag) for feature in bags.values() for bag in feature]
    return KeyedJaggedTensor(
        keys=list(bags), values=torch.tensor(values, dtype=torch.int64), lengths=torch.tensor(lengths)
    )


def test_ids_within_bounds_pass():
    check_bounds(features(user=[[0, 9], []], item=[[99], [0]], ad=[[2**33 - 1], []]), ROWS)


@pytest.mark.parametrize(
    ("bags", "message"),
    [
        (
            {"user": [[0, 9], []], "item": [[], [5, 100, 7]]},
            r"table 'items', feature 'item': id 100 at position 1 of the batch "
            r"\(sample 1\) is not in \[0, 100\).*Map ids to rows when reading",
        ),
        (
            {"user": [[0], [-1]], "item": [[], []]},
            r"table 'users', feature 'user': id -1 at position 1 .*\(sample 1\)",
        ),
        ({"user": [[], [], [10, 11, -5]]}, r"id 10 at position 0 .*\(sample 2\)"),
        ({"ad": [[2**33]], "user": [[99]]}, r"table 'ads', feature 'ad': id 8589934592 at position 0"),
        ({"other": [[-9, 5]], "user": [[10]]}, r"feature 'user': id 10 at position 0 .*\(sample 0\)"),
        ({"user": [[1], [], [2, 3], [4, 77]]}, r"id 77 at position 4 of the batch \(sample 3\)"),
    ],
)
def test_the_first_bad_id_is_named(bags, message):
    with pytest.raises(IdOutOfRangeError, match=message):
        check_bounds(features(**bags), ROWS)


def test_it_is_a_data_error_and_an_index_error():
    assert issubclass(IdOutOfRangeError, DataError)
    assert issubclass(IdOutOfRangeError, IndexError)


def test_features_that_no_table_uses_are_not_checked():
    check_bounds(features(other=[[-5, 2**62 + 1, 2**63 - 1]], user=[[3]]), ROWS)
    check_bounds(features(other=[[-5]]), {})


def test_nothing_to_check():
    check_bounds(features(user=[[], []], item=[[], []]), ROWS)
    check_bounds(features(user=[], item=[]), ROWS)


def test_int32_ids():
    kjt = KeyedJaggedTensor(["user", "ad"], torch.tensor([3, 10, 5], dtype=torch.int32), lengths=torch.tensor([2, 1]))
    with pytest.raises(IdOutOfRangeError, match="id 10 at position 1"):
        check_bounds(kjt, ROWS)


def test_a_batch_size_per_feature():
    kjt = KeyedJaggedTensor(
        ["user", "item"],
        torch.tensor([1, 2, 3, 4, 500]),
        lengths=torch.tensor([1, 2, 0, 1, 1]),
        stride_per_key_per_rank=[[2], [3]],
    )
    with pytest.raises(IdOutOfRangeError, match=r"feature 'item': id 500 at position 1 .*\(sample 2\)"):
        check_bounds(kjt, ROWS)


@given(
    st.lists(st.lists(st.integers(-2, 12), max_size=3), min_size=3, max_size=3),
    st.lists(st.lists(st.integers(-2, 102), max_size=3), min_size=3, max_size=3),
)
@settings(max_examples=60)
def test_every_batch_is_judged_as_a_slow_check_would(user, item):
    bad = [i for bag in user for i in bag if not 0 <= i < 10] or [i for bag in item for i in bag if not 0 <= i < 100]
    if not bad:
        check_bounds(features(user=user, item=item), ROWS)
        return
    with pytest.raises(IdOutOfRangeError, match=f"id {bad[0]} at"):
        check_bounds(features(user=user, item=item), ROWS)


def test_a_feature_is_bounded_by_its_smallest_table():
    def table(name: str, rows: int, *feature_names: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, num_embeddings=rows, feature_names=list(feature_names))

    tables = [table("a", 10, "x", "y"), table("b", 5, "y"), table("c", 7, "y", "z")]
    assert rows_by_feature(tables) == {"x": ("a", 10), "y": ("b", 5), "z": ("c", 7)}
    assert rows_by_feature([]) == {}
