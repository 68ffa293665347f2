"""An id that is no row of its table is found, and named so that it can be found in the data."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.data import Batch, Schema, SparseFeature
from embershard.data.block import Block
from embershard.data.hashing import RESERVED_ID
from embershard.errors import DataError, IdOutOfRangeError
from embershard.known_bounds import bounds_of, note_bounds
from embershard.sharding.torchrec.modules import CachedModule, check_bounds, rows_by_feature

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
        ({"user": [[0], [-1]], "item": [[], []]}, r"table 'users', feature 'user': id -1 at position 1 .*\(sample 1\)"),
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


@pytest.mark.slow
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


SCHEMA = Schema((), (SparseFeature("user", 10, "users"), SparseFeature("any", 5, takes_ids=True)))


def batch_of(*values: list[int]) -> Batch:
    """Samples of one id of each feature, as a source of one's own may give them."""
    ids = tuple(np.array(each, np.int64) for each in values)
    samples = np.zeros((len(ids[0]), 0), np.float32), np.zeros(len(ids[0]), np.float32)
    return Block(*samples, ids, (1,) * len(ids)).to_batch(SCHEMA)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (([3, 10], [7, 7]), r"table 'users', feature 'user': id 10 at position 1 of the batch \(sample 1\) is not in"),
        (([3, -1], [7, 7]), "table 'users', feature 'user': id -1 at position 1"),
        (
            ([3, 9], [7, RESERVED_ID]),
            r"feature 'any': id -9223372036854775808 at position 1 .*\(sample 1\) is reserved",
        ),
    ],
)
def test_who_reads_a_batch_finds_a_wrong_id(values, message):
    with pytest.raises(IdOutOfRangeError, match=message):
        batch_of(*values)


def test_a_wrong_id_s_sample_is_named_where_bags_differ():
    lengths = np.array([[2, 0, 1], [1, 1, 1]], np.int32)
    ids = np.array([1, 2, 99]), np.array([-5, 2**62, 0])
    with pytest.raises(IdOutOfRangeError, match=r"id 99 at position 2 of the batch \(sample 2\)"):
        Block(np.zeros((3, 0), np.float32), np.zeros(3, np.float32), ids, lengths).to_batch(SCHEMA)


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Names the features whose ids a module looks through."""
    found: list[str] = []
    for name in ("check_bounds", "check_any_ids"):
        monkeypatch.setattr(f"embershard.sharding.torchrec.modules.{name}", lambda _, tables: found.extend(tables))
    return found


def module(num_rows: int) -> CachedModule:
    made = CachedModule()
    made._rows_by_feature, made._table_of_ids = {"user": ("users", num_rows)}, {"any": "anything"}
    return made


def test_a_step_does_not_look_through_ids_that_were_checked(reads):
    batch = batch_of([3, 9], [-7, 2**62])
    module(10).check_ids(batch.sparse_features)
    moved = batch.to(torch.device("meta")).sparse_features
    module(10).check_ids(moved)
    assert moved.values().is_meta
    assert reads == []
    assert batch.sparse_features.length_per_key_or_none() == [2, 2]  # nor adds their lengths up


def test_ids_that_may_have_changed_are_looked_through(reads):
    features = batch_of([3, 9], [-7, 2**62]).sparse_features
    module(9).check_ids(features)  # of fewer rows
    assert reads == ["user"]
    module(10).check_ids(KeyedJaggedTensor(features.keys(), features.values(), lengths=features.lengths()))
    assert reads == ["user", "user", "any"]
    features.values()[0] = 10
    module(10).check_ids(features)
    assert reads == ["user", "user", "any", "user", "any"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda features: pickle.loads(pickle.dumps(features))])
def test_a_copy_of_ids_that_were_written_to_is_not_trusted(copied):
    features = KeyedJaggedTensor(["user"], torch.tensor([3]), lengths=torch.tensor([1]))
    features.values()[0] = 4  # a copy's tensors have been written to once, too
    features.lengths()[0] = 1
    note_bounds(features, {"user": 10})
    features.values()[0] = 10
    assert bounds_of(copied(features)) == {}


def test_nothing_is_known_where_torch_counts_no_writes():
    with torch.inference_mode():
        features = batch_of([3], [7]).sparse_features
    assert bounds_of(features) == {}
